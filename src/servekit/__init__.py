"""servekit: a local LLM server, and the tools to plan and measure it. Importing it imports no torch."""

__version__ = "0.1.0"
