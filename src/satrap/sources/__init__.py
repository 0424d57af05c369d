"""Training data: declared sources, and the road from their files to batches.

Reading order: block (what a source gives), order (who reads what), ahead (threads), road (windows, batches, positions),
source (what a user declares); then files, decode, text_file, text, and one file for each kind.
"""

from satrap.sources.arrow import Arrow
from satrap.sources.criteo import Criteo
from satrap.sources.frame import Frame
from satrap.sources.iterable import Iterable
from satrap.sources.parquet import Parquet
from satrap.sources.road import Batches
from satrap.sources.source import Source
from satrap.sources.text import CSV

__all__ = ["Arrow", "Batches", "CSV", "Criteo", "Frame", "Iterable", "Parquet", "Source"]
