"""The environment of a step process: declaration, context, signed and private inputs, outcome."""
