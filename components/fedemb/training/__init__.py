"""Training rounds: virtual clients, units, server step, JAX, audit evidence.

The mechanism does all clipping, summation, noise and accounting:

    >>> import secrets
    >>> import numpy as np
    >>> from fedemb.config import LocalTrainingConfig, ModelConfig, ServerConfig
    >>> from fedemb import (
    ...     ClientExamples, GroupPoissonGaussianConfig, RoundFunction, assign_weights,
    ...     build_backbone, build_mechanism, embed, initial_state, plan as plan_of,
    ...     released_weights, server_step)
    >>> plan = plan_of(GroupPoissonGaussianConfig(
    ...     rounds=2, noise_multiplier=1.0, sampling_probability=0.5), virtual_clients=8)
    >>> mechanism = build_mechanism(plan, secrets.token_bytes(32), "my-run", 1, "0" * 64)
    >>> backbone = build_backbone(ModelConfig(backbone="tiny", image_size=12, embedding_dim=8), 0)
    >>> train_round = RoundFunction(backbone, mechanism, LocalTrainingConfig(batch_size=4))
    >>> server = ServerConfig(learning_rate=0.5)
    >>> state = initial_state(train_round.initial_weights())
    >>> random = np.random.default_rng(0)
    >>> def example_client(group):
    ...     images = random.integers(0, 256, (6, 12, 12, 1), np.uint8)
    ...     return ClientExamples(0, group, images, labels=np.array([7, 7, 9, 9, 9, 5]))
    >>> for number in range(plan.rounds):
    ...     sums = train_round(state.weights, [example_client(0), example_client(3)], number)
    ...     output = mechanism.aggregate(number, sums.total)  # noised
    ...     state = server_step(server, state, output.mean, rounds=plan.rounds)
    >>> assign_weights(backbone.trainable_variables, released_weights(server, state))
    >>> embed(backbone, random.integers(0, 256, (5, 12, 12, 1), np.uint8)).shape
    (5, 8)

In a real run, `mechanism.sample_clients` selects the participants, and the root key comes from the
reservation. To train virtual clients in parallel, call `configure_threads` first and pass its
result as `workers`. TensorFlow is imported when a function is called, not with this package.
"""
