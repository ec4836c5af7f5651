"""The length tagger as a service, and how its estimators are judged."""
