"""Bagelplane: the data plane for BAGEL-style multimodal training."""

__version__ = "0.1.0"
