"""Public backbones by name: reads their weights, builds them in Keras, and describes each file."""
