"""Transformers in Flax whose variants are configuration, with blocks and sublayers callable one by one."""

from models.config import ModelConfig as ModelConfig
