import fedemb

images, users = fedemb.glyphs(users=5000)  # or your own: uint8 [n, 28, 28, 1] and [n]
train = users < 4500
local = fedemb.LocalTrainingConfig(client_learning_rate=0.1, head_learning_rate_scale=12)
simulation = fedemb.Simulation(
    mechanism=fedemb.GroupPoissonGaussianConfig(
        kind="group_poisson_gaussian", rounds=30, sampling_probability=0.2, noise_multiplier=1.2
    ),
    virtual_clients=140,  # about 32 users each
    model=fedemb.ModelConfig(backbone="tiny", embedding_dim=32),
    training=fedemb.TrainingConfig(local=local),
)
result = simulation.train(images[train], labels=users[train], users=users[train])
print(result.guarantee)
print(result.recall(images[~train], users[~train], false_accept_rate=0.1))
