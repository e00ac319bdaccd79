"""What lets partition_users grow: read off the graph that is sent to a Beam engine.

A worker must never need the list of users, the list of groups or a set of images. The graph shows
it: no side input anywhere; a GroupByKey only by keys whose number a public constant decides; users
capped by a combiner before anything else sees them together..
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.portability.api import beam_runner_api_pb2

from fedemb.data.identity import KeyRef
from fedemb.data.sources import Part
from fedemb.partition import shards, transforms
from fedemb.partition.transforms import Job, build_public
from tests.kit.pipeline_runs.partition_run import KEY, make_config

BY_CONSTANTS = {"ByShard", "ByGroups", "ByFolder", "ByRejectShard", "ByRange"}
"""Grouped by hash range: shards, files of groups, folders."""
CAP = "CapPerUser"

proto: Any = beam_runner_api_pb2  # generated: no types


def graph_of(options: dict[str, Any] | None = None) -> Any:
    """The graph of both passes, as it is sent."""
    config = make_config("rows.parquet", **(options or {}))
    job = Job(config, KeyRef("keys", "policy"), shards.Place("root", None), None)
    pipeline = beam.Pipeline(runner="FnApiRunner")
    files = [Part("/", f"rows-{number}.parquet") for number in range(3)]
    transforms.build(pipeline, job, files)
    build_public(pipeline, job, config.data.source, files)
    return pipeline.to_runner_api()


def faults(graph: Any) -> list[str]:
    """What would not scale."""
    every = graph.components.transforms
    parents = {child: name for name, node in every.items() for child in node.subtransforms}
    producers = {
        output: name
        for name, node in every.items()
        if not node.subtransforms
        for output in node.outputs.values()
    }
    user_parts = next(
        output
        for node in every.values()
        if node.unique_name == "Prepare/ParDo(_Prepare)"
        for tag, output in node.outputs.items()
        if tag not in ("counts", "rejects")
    )

    def ancestors(name: str) -> Iterator[Any]:
        while name in parents:
            name = parents[name]
            yield every[name]

    def combines(name: str) -> bool:
        return any(node.spec.urn == "beam:transform:combine_per_key:v1" for node in ancestors(name))

    def uncapped(name: str) -> bool:
        """Whether parts of users reach a transform on a way around the cap."""
        seen, ahead = set[str](), {name}
        while ahead:
            node = every[ahead.pop()]
            if node.unique_name.startswith(f"{CAP}/"):
                continue
            inputs = set(node.inputs.values()) - seen
            seen |= inputs
            ahead |= {producers[one] for one in inputs}
        return user_parts in seen

    found = []
    for name, node in every.items():
        if node.subtransforms:
            continue
        if node.spec.urn == "beam:transform:pardo:v1":
            payload = proto.ParDoPayload.FromString(node.spec.payload)
            found += [f"side input of {node.unique_name}" for _ in payload.side_inputs]
        if node.spec.urn == "beam:transform:group_by_key:v1":
            label = node.unique_name.split("/")[0]
            spread = "/ReshufflePerKey/" in node.unique_name
            if not (spread or combines(name) or label in BY_CONSTANTS):
                found.append(f"{node.unique_name} groups by keys that grow with the data")
            if not spread and uncapped(name):
                found.append(f"{node.unique_name} sees users before their images are capped")
    labels = {node.unique_name: node.spec.urn for node in every.values()}
    if labels.get(CAP) != "beam:transform:combine_per_key:v1":
        found.append("the per-user cap is not a combiner")
    return found


def test_graph_has_nothing_of_the_size_of_the_data() -> None:
    assert faults(graph_of()) == []


def test_graph_holds_no_key_and_its_size_does_not_follow_shards_or_groups() -> None:
    small = graph_of().SerializeToString()
    large = graph_of(
        {
            "partition__shards": 10_000,
            "partition__groupings": 40,
            "partition__virtual_clients": 3_000_000,
        }
    ).SerializeToString()
    assert len(large) < len(small) + 2_000
    assert KEY.hex().encode() not in small
