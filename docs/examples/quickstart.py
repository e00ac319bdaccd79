import fedemb

images, users = fedemb.glyphs(users=5000)  # or your own: uint8 [n, 28, 28, 1] and [n]
train = users < 4500
local = fedemb.LocalTrainingConfig(client_learning_rate=0.1, head_learning_rate_scale=12)
model = fedemb.ModelConfig(backbone="tiny", embedding_dim=32)
sampling = {"rounds": 30, "sampling_probability": 0.2}

untrained = fedemb.embed(fedemb.build_backbone(model, seed=1), images[~train])
print("without training:", fedemb.recall(untrained, users[~train], 0.1))
for name, noise in {"private": 1.2, "without privacy": 0.0}.items():
    simulation = fedemb.Simulation(
        mechanism=fedemb.GroupPoissonGaussianConfig(**sampling, noise_multiplier=noise),
        virtual_clients=140,  # about 32 users each
        model=model,
        training=fedemb.TrainingConfig(local=local),
    )
    result = simulation.train(images[train], labels=users[train], users=users[train])
    print(f"{name}:", result.recall(images[~train], users[~train], false_accept_rate=0.1))
    print(result.guarantee)
