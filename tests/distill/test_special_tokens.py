"""Special tokens by role: what maps to what, whatever the names and numbers."""

from __future__ import annotations

from slime_tandem.distill.special_tokens import SpecialMap, map_special_tokens
from slime_tandem.tokens.token_bytes import TokenBytes


def vocabulary(names: dict[int, str], eos: set[int], plain: dict[int, str] | None = None) -> TokenBytes:
    """Special tokens by `names`; `plain` are added tokens with bytes."""
    plain = plain or {}
    size = max([*names, *plain]) + 1
    table = tuple(plain[i].encode() if i in plain else None if i in names else b"x" for i in range(size))
    return TokenBytes(table, frozenset(names), frozenset(eos), {**names, **plain})


QWEN = vocabulary(
    {1: "<|endoftext|>", 2: "<|im_start|>", 3: "<|im_end|>", 9: "<|vision_start|>"},
    {1, 3},
    {4: "<think>", 5: "</think>", 6: "<tool_call>"},
)
LLAMA = vocabulary({0: "<|begin_of_text|>", 1: "<|end_of_text|>", 2: "<|start_header_id|>", 3: "<|eot_id|>"}, {1, 3})
MISTRAL = vocabulary(
    {1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 5: "[TOOL_CALLS]", 6: "[THINK]", 7: "[/THINK]"}, {2}
)


def shown(found: SpecialMap) -> list[str]:
    return [str(row) for row in found.rows]


def test_qwen_to_llama() -> None:
    assert shown(map_special_tokens(QWEN, LLAMA, 3)) == [
        "1 <|endoftext|> (eos) -> 3 <|eot_id|>",
        "2 <|im_start|> (turn_start) -> 2 <|start_header_id|>",
        "3 <|im_end|> (eos, turn_end) -> 3 <|eot_id|>",
        "9 <|vision_start|> (no role) -> nothing (masked)",
    ], "markers that have bytes are text to Llama"


def test_qwen_to_mistral_maps_the_markers() -> None:
    rows = shown(map_special_tokens(QWEN, MISTRAL, 2))
    assert "4 <think> (think_start) -> 6 [THINK]" in rows
    assert "5 </think> (think_end) -> 7 [/THINK]" in rows
    assert "6 <tool_call> (tool_call_start) -> 5 [TOOL_CALLS]" in rows
    as_text = shown(map_special_tokens(QWEN, MISTRAL, 2, "text"))
    assert not any("think" in row for row in as_text), "with bytes of their own, they are text already"


def test_mistral_to_llama_writes_markers_as_text() -> None:
    found = map_special_tokens(MISTRAL, LLAMA, 3)
    assert found.texts == {5: "[TOOL_CALLS]", 6: "[THINK]", 7: "[/THINK]"}
    assert found.ids[2] == 3
    assert found.ids[1] == 0, "the only begin of text"
    assert found.ids[4] == 3, "what ends a turn of the user ends a turn"
    assert found.unmapped == ()


def test_a_role_with_several_tokens_is_not_guessed() -> None:
    deepseek = vocabulary(
        {0: "<\uff5cUser\uff5c>", 1: "<\uff5cAssistant\uff5c>", 2: "<\uff5cend\u2581of\u2581sentence\uff5c>"}, {2}
    )
    found = map_special_tokens(QWEN, deepseek, 2)
    assert [row.name for row in found.unmapped] == ["<|im_start|>"]
    # Where the name is the same, it is no guess.
    assert map_special_tokens(deepseek, deepseek, 2).ids == {0: 0, 1: 1, 2: 2}
