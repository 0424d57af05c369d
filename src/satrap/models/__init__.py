"""Ready models, plain nn.Modules: dense [batch, num_dense] (or None) and the block [batch, total_dim] in, logits out.

Written to be read and changed: copy one into your own code when it should do more. Nothing in them knows of tables.
"""

from satrap.models.dcn import DCN
from satrap.models.dlrm import DLRM
from satrap.models.ffnn import FFNN

__all__ = ["DCN", "DLRM", "FFNN"]
