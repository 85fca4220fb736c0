"""onnxruntime-genai's model builder, made to read Gemma 3's rope settings; its command line is unchanged.

    python -m benchmarks.cpu_peers.onnxruntime_builder --input FOLDER --output FOLDER --precision int4 ...

Version 0.18 needs transformers 5, but looks for the two rope bases where transformers 4 had them.
"""

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import onnxruntime_genai


def main() -> None:
    """Run the builder as the script that it is."""
    folder = Path(onnxruntime_genai.__file__).parent / "models"
    sys.path.insert(0, str(folder))  # where it imports its parts from
    builders: Any = importlib.import_module("builders")
    build = builders.Gemma3Model

    def gemma3(config: Any, *others: Any) -> Any:
        by_kind = config.rope_parameters
        config.rope_parameters = by_kind["full_attention"]
        config.rope_theta = by_kind["full_attention"]["rope_theta"]
        config.rope_local_base_freq = by_kind["sliding_attention"]["rope_theta"]
        return build(config, *others)

    builders.Gemma3Model = gemma3
    runpy.run_path(str(folder / "builder.py"), run_name="__main__")


if __name__ == "__main__":
    main()
