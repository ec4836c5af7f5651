"""The length tagger's service, and the evaluation of its estimators."""
