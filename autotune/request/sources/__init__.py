"""Sources of a request: each is read into the small frozen values of `request/values.py`."""
