import fedemb

images, users = fedemb.glyphs(users=5000)  # or your own: uint8 [n, 28, 28, 1] and [n]
train = users < 4500
config = fedemb.load_config("quickstart").updated(
    {
        "purpose": "simulation",
        "policy.users_lower_bound": 4500,
        "partition.virtual_clients": 280,  # about 16 users each
        "mechanism.sampling_probability": 0.2,
    }
)
untrained = fedemb.embed(fedemb.build_backbone(config.model, seed=1), images[~train])
print("without training:", fedemb.recall(untrained, users[~train], 0.1))
for name, noise in {"private": 1.2, "without privacy": 0.0}.items():
    simulation = fedemb.Simulation.of(config.updated({"mechanism.noise_multiplier": noise}))
    result = simulation.train(images[train], labels=users[train], users=users[train])
    print(f"{name}:", result.recall(images[~train], users[~train], false_accept_rate=0.1))
    print(result.guarantee)
