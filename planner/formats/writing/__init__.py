"""Shared parts of all exports: values, texts and parts of models."""
