"""Settings by the number of cards of one machine: where everybody fits, for senior and junior of a few billion weights.

A size stands above the configuration's file and below `--set`. It places; whether it all fits is for the plan to say.
"""

from __future__ import annotations

from slime_tandem.errors import ConfigError

CARDS: dict[int, tuple[str, ...]] = {
    # Trainer and senior in turns on every card; who is frozen is served beside them on the last one.
    1: ("cluster.gpus_per_node=1", "cluster.side_servers=true", "cluster.mem_fraction=0.3"),
    2: ("cluster.gpus_per_node=2", "cluster.side_servers=true", "cluster.mem_fraction=0.4"),
    # Trainer and senior in turns; junior and teacher with a card each.
    4: ("cluster.gpus_per_node=4", "cluster.side_servers=false"),
    8: ("cluster.gpus_per_node=8", "cluster.side_servers=false"),
}


def settings_of(cards: int) -> list[str]:
    """`key=value` of a size; raises ConfigError for a number of cards that has none.

    >>> settings_of(4)
    ['cluster.nodes=1', 'cluster.gpus_per_node=4', 'cluster.side_servers=false']
    """
    if cards not in CARDS:
        expected = f"one of {', '.join(map(str, CARDS))}"
        raise ConfigError("--size", cards, expected, "set cluster.* by hand (docs/scaling.md)")
    return ["cluster.nodes=1", *CARDS[cards]]
