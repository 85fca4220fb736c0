"""TokenScoreSpec: a decoder that scores a pair of texts by which word it would say next. It must not know tensors.

Qwen3-Reranker and its like are prompted to answer yes or no; the score is how much more likely yes is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from servekit.engine.spec.json_files import parse_json, read_json_if_there
from servekit.errors import ModelError

QUERY, DOCUMENT = "\x02query\x02", "\x02document\x02"
"""What stands in a prompt for the two texts."""

QWEN3_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    f"<Query>: {QUERY}\n<Document>: {DOCUMENT}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""As the model card of Qwen3-Reranker gives it, with its standard instruction."""

ScoreToken = int | str
"""A token by its id, or by its text where only that is known."""


@dataclass(frozen=True, slots=True)
class TokenScoreSpec:
    """`true_token` and, unless None, `false_token` are compared. `prompt` is None where the chat template has it.

    `instruction` is the system message for such a template. `score_activation` turns the difference into the score.
    """

    true_token: ScoreToken
    false_token: ScoreToken | None
    prompt: str | None
    instruction: str | None = None
    score_activation: Literal["sigmoid", "identity"] = "sigmoid"


def read_token_score_spec(directory: Path, config: Mapping[str, Any]) -> TokenScoreSpec | None:
    """What the folder says of itself, in sentence-transformers' files or in config.json; None for any other model.

    In config.json that is `classifier_from_token`, a list of the words for no and for yes, as vLLM has it.
    """
    if (folder := _logit_score_folder(directory)) is not None:
        score = read_json_if_there(directory / folder / "config.json")
        texts = read_json_if_there(directory / "config_sentence_transformers.json")
        true_token, false_token = score.get("true_token_id"), score.get("false_token_id")
        if not isinstance(true_token, int) or not isinstance(false_token, int | None):
            raise ModelError(f"{folder}/config.json: true_token_id and false_token_id must be token ids")
        prompts = texts.get("prompts") or {}
        activation = str(texts.get("activation_fn") or "Sigmoid").rsplit(".", 1)[-1]
        if activation not in ("Sigmoid", "Identity"):
            raise ModelError(f"config_sentence_transformers.json: the activation {activation!r} is not known")
        return TokenScoreSpec(
            true_token,
            false_token,
            prompt=None,
            instruction=prompts.get(texts.get("default_prompt_name")),
            score_activation="sigmoid" if activation == "Sigmoid" else "identity",
        )
    words = config.get("classifier_from_token")
    if words is None:
        return None
    if not isinstance(words, list) or len(words) != 2 or not all(isinstance(word, str) for word in words):
        raise ModelError("config.json: classifier_from_token must list two words, the one for no first")
    if config.get("model_type") != "qwen3":
        raise ModelError(
            f"config.json: no prompt for pairs is known for {config.get('model_type')}",
            hint="a chat template with the roles query and document, and a LogitScore in modules.json, give one",
        )
    return TokenScoreSpec(words[1], words[0], QWEN3_PROMPT)


def _logit_score_folder(directory: Path) -> str | None:
    file = directory / "modules.json"
    modules = parse_json(file) if file.is_file() else []
    for module in modules if isinstance(modules, list) else []:
        if isinstance(module, dict) and str(module.get("type", "")).rsplit(".", 1)[-1] == "LogitScore":
            folder = str(module.get("path", ""))
            if ".." in Path(folder).parts or Path(folder).is_absolute():
                raise ModelError(f"modules.json: {folder!r} leads out of the model's folder")
            return folder
    return None
