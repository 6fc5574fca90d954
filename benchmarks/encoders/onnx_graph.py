"""The encoder as an ONNX graph, with the fused operators that ONNX Runtime's own optimiser makes from a BERT."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from examples.minilm import DIMENSIONS, LayerNorm, Parameters

FUSED = "com.microsoft"
OPSETS = (helper.make_opsetid("", 20), helper.make_opsetid(FUSED, 1))
IR_VERSION = 9  # the version that came with opset 20


class Nodes:
    """Nodes in the order of their edges, each of which has a name."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def constant(self, values: npt.ArrayLike) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def apply(self, operator: str, inputs: Sequence[str], *, outputs: int = 1, **attributes: Any) -> str:
        """Add a node, and return its first output."""
        names = [f"edge_{len(self.nodes)}_{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, **attributes))
        return names[0]


def build(parameters: Parameters) -> ModelProto:
    """Return the model.

    Its inputs are `tokens` and `mask`, both int32 [batch, length]; its output is float32 [batch, 384].
    """
    nodes = Nodes()
    norm = (nodes.constant(parameters.norm.scale), nodes.constant(parameters.norm.bias))
    tables = (nodes.constant(parameters.words), nodes.constant(parameters.positions))
    # The empty names stand for token types; their only embedding is added to the embedding of the positions.
    hidden = nodes.apply(
        "EmbedLayerNormalization",
        ["tokens", "", *tables, "", *norm],
        outputs=2,
        domain=FUSED,
        epsilon=parameters.epsilon,
    )
    for number in range(len(parameters.layers.up.bias)):
        hidden = _apply_layer(nodes, parameters, number, hidden)
    vectors = _average(nodes, hidden)
    shape = ["batch", "length"]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT32, shape) for name in ("tokens", "mask")]
    outputs = [helper.make_tensor_value_info(vectors, TensorProto.FLOAT, ["batch", DIMENSIONS])]
    graph = helper.make_graph(nodes.nodes, "minilm", inputs, outputs, nodes.constants)
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=IR_VERSION)


def _apply_layer(nodes: Nodes, parameters: Parameters, number: int, hidden: str) -> str:
    layer = jax.tree.map(lambda stacked: stacked[number], parameters.layers)

    def normalise(norm: LayerNorm, inputs: str, bias: npt.ArrayLike, residual: str) -> str:
        constants = [nodes.constant(each) for each in (norm.scale, norm.bias, bias)]
        return nodes.apply(
            "SkipLayerNormalization", [inputs, residual, *constants], domain=FUSED, epsilon=parameters.epsilon
        )

    projection = [nodes.constant(layer.query_key_value.kernel), nodes.constant(layer.query_key_value.bias)]
    mixed = nodes.apply("Attention", [hidden, *projection, "mask"], domain=FUSED, num_heads=parameters.heads)
    attended = nodes.apply("MatMul", [mixed, nodes.constant(layer.attention.kernel)])
    hidden = normalise(layer.attention_norm, attended, layer.attention.bias, hidden)
    wide = nodes.apply("MatMul", [hidden, nodes.constant(layer.up.kernel)])
    wide = nodes.apply("BiasGelu", [wide, nodes.constant(layer.up.bias)], domain=FUSED)
    narrow = nodes.apply("MatMul", [wide, nodes.constant(layer.down.kernel)])
    return normalise(layer.norm, narrow, layer.down.bias, hidden)


def _average(nodes: Nodes, hidden: str) -> str:
    """Return the sum over the tokens of a text, scaled to length 1: no division by their number is needed."""
    rows = nodes.constant(np.array([1]))
    weights = nodes.apply("Unsqueeze", [nodes.apply("Cast", ["mask"], to=TensorProto.FLOAT), rows])
    total = nodes.apply("Squeeze", [nodes.apply("MatMul", [weights, hidden]), rows])
    return nodes.apply("LpNormalization", [total], axis=-1, p=2)
