"""What a step process works in: declaration, context, signed and private inputs, outcome."""
