"""One module for each step: its Kubeflow component and its logic."""
