"""Preparation of samples from text: tokenizers, Megatron's token files and sample order. No torch."""

from runtime.data.corpus import stdlib_corpus
from runtime.data.datasets import (
    Datasets,
    Samples,
    build_datasets,
    build_separate_datasets,
    check_vocabulary,
)
from runtime.data.indexed_dataset import IndexedDataset, best_dtype
from runtime.data.indexed_writer import IndexedWriter
from runtime.data.merge import merge
from runtime.data.preparation import prepare
from runtime.data.samples import SampleDataset, split_sequences
from runtime.data.summary import Summary
from runtime.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "Datasets",
    "IndexedDataset",
    "IndexedWriter",
    "SampleDataset",
    "Samples",
    "Summary",
    "Tokenizer",
    "best_dtype",
    "build_datasets",
    "build_separate_datasets",
    "check_vocabulary",
    "load_tokenizer",
    "merge",
    "prepare",
    "split_sequences",
    "stdlib_corpus",
]
