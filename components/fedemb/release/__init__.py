"""Release: plan and rules of the gate, bundle, card, verification, registries, use of a model."""
