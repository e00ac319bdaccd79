"""The rules that allow or deny a release."""
