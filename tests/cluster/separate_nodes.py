"""The node provider of `local_cluster`: Ray's fake nodes, each with a session folder of its own, as real nodes have it.

In one folder for all, a node that unpacks a job's working directory would replace that of the others under their feet.
Loaded by the cluster's autoscaler, which finds this folder alone.
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any
from unittest.mock import patch

from ray._private import parameter
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class SeparateNodesProvider(FakeMultiNodeProvider):
    def _create_node_with_resources_and_labels(self, *arguments: Any) -> None:
        folder = tempfile.mkdtemp(dir=self.provider_config["nodes_folder"], prefix="")
        with patch.object(parameter, "RayParams", partial(parameter.RayParams, temp_dir=folder)):
            super()._create_node_with_resources_and_labels(*arguments)
