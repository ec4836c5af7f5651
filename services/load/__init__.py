"""Open-loop load on an OpenAI endpoint; plans and reports are in simulator/load_plan.py and load_report.py."""
