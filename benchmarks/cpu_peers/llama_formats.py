"""Write a GGUF file in another weight format, with llama.cpp's own quantiser and its own defaults.

    python -m benchmarks.cpu_peers.llama_formats SOURCE.gguf TARGET.gguf F16|Q8_0|Q4_0|Q4_1 [pure]

`pure` puts the output head into the same format, where llama.cpp would give it more bits.
"""

import sys

import llama_cpp


def main(source: str, target: str, name: str, pure: bool) -> None:
    """Dequantise and quantise again. Ends with a message when llama.cpp refuses."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    params.allow_requantize = True
    params.pure = pure
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), params):
        raise SystemExit(f"llama.cpp cannot write {target}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], pure=sys.argv[4:] == ["pure"])
