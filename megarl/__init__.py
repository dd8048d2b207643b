"""megarl: reinforcement learning for reasoning language models on Megatron-Core, built around policy entropy."""

__version__ = "0.1.0"
