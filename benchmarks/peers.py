"""Peers that servekit is measured against and checked with, given the very same weights."""

from typing import Any

import torch
import transformers

from servekit.engine.load import OpenModel, open_model


def transformers_model(model: OpenModel, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own class for a model, with the weights that our reader finds; those of a GGUF file dequantised.

    Its own GGUF loader would take a minute, nearly all of it for a tokenizer that is not needed here.
    """
    config: Any = transformers.AutoConfig.for_model(**model.config)
    wanted: Any = getattr(transformers, config.architectures[0])
    source = open_model(model.files).source  # of its own: whoever loads `model` as well closes that one's
    state = {name: source.load(name).to(dtype) for name in source.shapes()}
    source.close()
    loaded, problems = wanted.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    wrong = {kind: names for kind, names in problems.items() if names}
    assert not wrong, f"transformers and the files do not agree: {wrong}"
    return loaded
