"""Peers that servekit is measured against and checked with, given the very same weights."""

from typing import Any

import torch
import transformers

from servekit.engine.load import OpenModel
from servekit.engine.models.gguf import GgufSource


def transformers_llama(model: OpenModel, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' Llama with the weights of a GGUF model, dequantised by the same reader.

    Its own GGUF loader would take a minute, nearly all of it for a tokenizer that is not needed here.
    """
    assert model.files.weights is not None, "only GGUF models are wrapped"
    config: Any = transformers.AutoConfig.for_model(**model.config)
    with torch.device("meta"):
        llama: Any = transformers.LlamaForCausalLM(config)
    source = GgufSource(model.files.weights)
    llama.load_state_dict({name: source.load(name).to(dtype) for name in source.shapes()}, strict=False, assign=True)
    source.close()
    llama.tie_weights()
    llama.model.rotary_emb = type(llama.model.rotary_emb)(config)
    unfilled = [name for name, parameter in llama.named_parameters() if parameter.is_meta]
    assert not unfilled, f"transformers wants tensors that the file does not have: {unfilled}"
    return llama.eval()
