"""Bugs of the rounds on JAX, of devices and of hosts."""

from __future__ import annotations

from tests.planted_bugs.mutants import modules
from tests.planted_bugs.mutants.places import one

CLIENTS = "tests/components/embedding/test_embedding_jax_clients.py"
UNITS = "tests/components/embedding/test_embedding_jax_units.py"
TRAINING = "tests/components/train_dp_fedemb"
TOGETHER = (
    f"{TRAINING}/test_train_hosts.py::test_two_processes_give_the_bits_of_one[classification]"
)

MUTANTS = (
    one(
        10,
        "what_fills_a_batch_is_learned_from_on_jax",
        (modules.JAX_LOCAL, "_batch", "offset + jnp.arange(size) < client.examples", "chosen >= 0"),
        CLIENTS,
    ),
    one(
        10,
        "clients_train_as_long_as_the_largest_on_jax",
        (modules.JAX_CLIENT_ROUNDS, "_share", "len(data.rows)", "most"),
        CLIENTS,
    ),
    one(
        6,
        "one_seed_for_all_clients",
        (modules.ROUNDS, "_data", "client.group", "0"),
        CLIENTS,
    ),
    one(
        6,
        "one_seed_for_all_rounds",
        (modules.UNIT, "_share", "round_index", "0"),
        UNITS,
    ),
    one(
        1,
        "clip_in_32_bits_on_jax",
        (modules.CLIP, "ClippedSum.record", "'float64'", "'float32'"),
        UNITS,
    ),
    one(
        1,
        "devices_are_added_up_in_floats",
        (
            modules.JAX_ROUNDS,
            "added",
            "return total + jax.lax.psum(jnp.sum(mine, axis=0), _UNITS)",
            (
                "mine = jnp.sum(mine, axis=0).astype('float32')\n"
                "return total + jax.lax.psum(mine, _UNITS).astype(part.dtype)"
            ),
        ),
        UNITS,
    ),
    one(
        3,
        "gradients_of_all_devices_are_one_record",
        (modules.JAX_ROUNDS, "_step", "on_each_device(broadcast)", "broadcast"),
        UNITS,
    ),
    one(
        10,
        "each_device_counts_the_earlier_steps",
        (
            modules.JAX_ROUNDS,
            "added",
            "total + jax.lax.psum(jnp.sum(mine, axis=0), _UNITS)",
            "jax.lax.psum(total + jnp.sum(mine, axis=0), _UNITS)",
        ),
        UNITS,
    ),
    one(
        7,
        "kernels_that_give_other_bits_again",
        (
            modules.BACKEND,
            "",
            "'--xla_gpu_deterministic_ops=true --xla_gpu_shard_autotuning=false'",
            "'--xla_gpu_deterministic_ops=false --xla_gpu_shard_autotuning=false'",
        ),
        f"{UNITS}::test_a_gpu_is_told_to_give_the_same_bits_again",
    ),
    one(
        7,
        "backend_is_not_among_the_inputs",
        (
            modules.CONFIG_DIGEST,
            "config_digest",
            "return json_digest(config.model_dump(mode='json', exclude=left_out))",
            (
                "tree = config.model_dump(mode='json', exclude=left_out)\n"
                "return json_digest({**tree, 'training': {**tree['training'], 'backend': None}})"
            ),
        ),
        "tests/pipelines/test_resume.py::test_another_backend_is_another_configuration",
    ),
    one(
        7,
        "a_plan_may_name_the_other_backend",
        (
            modules.PLAN_DOCUMENT,
            "check_plan",
            "document.backend != config.training.backend",
            "document.backend is None",
        ),
        "tests/components/gate/test_gate_rules.py::"
        "test_plan_and_report_name_the_backend_that_was_configured",
    ),
    one(
        10,
        "a_host_adds_units_of_its_own",
        (modules.JAX_ROUNDS, "follow", "step._make(hosts.decoded_arrays(body, step))", "step"),
        TOGETHER,
    ),
    one(
        7,
        "a_host_keeps_the_weights_of_the_first_round",
        (
            modules.JAX_ROUNDS,
            "follow",
            "state = self._begun(weights, np.float64(clip))",
            (
                "first = state[1] if state else None\n"
                "state = self._begun(weights, np.float64(clip))\n"
                "state = (state[0], first or state[1])"
            ),
        ),
        TOGETHER,
    ),
    one(
        7,
        "a_host_of_other_code_computes",
        (
            modules.HOSTS,
            "_built",
            "code_digest(config) != described['code_sha']",
            "not described['code_sha']",
        ),
        f"{TRAINING}/test_train_hosts.py::test_a_host_of_other_code_refuses_to_compute",
    ),
)
