"""The model tables say what gluon and the papers say."""

from __future__ import annotations

import mxnet as mx
import pytest
from mxnet.gluon import nn, rnn
from mxnet.gluon.model_zoo import vision

from experiments import figure5
from experiments.models import MODELS, THESIS_MODELS, load
from experiments.models.sockeye import Sockeye
from p3kv.frontends.mxnet.layers import trace
from p3kv.report.forecast import bound


def _share(name, layer):
    model = load(name)
    return {one.name: one.elems for one in model.layers}[layer] / model.elems


def test_one_dense_layer_of_vgg19_holds_the_papers_share():
    assert _share("vgg19", "dense0") == pytest.approx(0.715, abs=0.0005)  # P3, figure 5(c)


def test_sockeyes_heaviest_layer_is_the_initial_one():
    model = load("sockeye")
    assert model.layers[0].name == "source_embed"
    assert model.layers[0].elems == max(layer.elems for layer in model.layers)


def test_sockeyes_decoder_is_one_layer_because_its_cells_take_turns():
    model = load("sockeye")
    assert [layer.name for layer in model.layers] == [
        "source_embed",
        "encoder_birnn",
        "encoder_rnn_l0",
        "target_embed",
        "decoder",
        "logits",
    ]


@pytest.mark.parametrize(("name", "billions"), [("resnet50", 3.8), ("vgg19", 19.6)])
def test_work_is_what_the_resnet_paper_counts(name, billions):
    """He et al., table 1 and section 3.3, count a multiplication and an addition as one."""
    model = load(name)
    work = sum(layer.flops for layer in model.layers) / model.batch_size / 2
    assert work / 1e9 == pytest.approx(billions, rel=0.025)


@pytest.mark.parametrize(
    ("name", "published", "billions"),
    [
        ("googlenet", 6_998_552, 1.58),  # Caffe's bvlc_googlenet
        ("resnet110", 1_727_962, 0.253),  # He et al., table 6: 1.7 million
        ("inception_v4", 42_679_816, 12.3),  # with a scale beside each offset
    ],
)
def test_the_thesiss_models_have_the_parameters_and_the_work_that_are_published(
    name, published, billions
):
    model = load(name)
    offsets = [p.elems for p in model.parameters if p.name.endswith("beta")]
    scales = sum(offsets) if name == "inception_v4" else 0
    assert model.elems + scales == published
    work = sum(layer.flops for layer in model.layers) / model.batch_size / 2
    assert work / 1e9 == pytest.approx(billions, rel=0.01)


def test_gpt2_has_the_published_parameters_and_its_tied_weight_once():
    model = load("gpt2_small")
    assert model.elems == sum(parameter.elems for parameter in model.parameters) == 124_439_808
    assert not model.layers[-1].parameters and model.layers[-1].flops > 0
    # Six times the parameters for each token, as the output reads the embedding, and attention.
    work = 3 * sum(layer.flops for layer in model.layers) / model.batch_size / 1024
    matrices = 124_439_808 - 1024 * 768
    attention = 3 * 12 * 4 * 1024 * 768
    assert work == pytest.approx(6 * matrices + attention, rel=0.01)


@pytest.mark.parametrize(
    ("name", "stretched", "ratio"), [("resnet110", 20, 1.17), ("inception_v4", 4, 3.14)]
)
def test_the_thesiss_models_have_its_ratio_of_communication_to_computation(name, stretched, ratio):
    """Its table 1.1 has steps a second; its four machines have links of 1 Gbit/s."""
    model = load(name)
    wire_s = bound.wire_time_s(model.size_bytes, 4, 1e9)
    assert stretched * wire_s / model.compute_s == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize("name", MODELS + THESIS_MODELS)
def test_every_trained_parameter_is_in_one_layer_and_has_a_key(name):
    model = load(name)
    names = [parameter.name for layer in model.layers for parameter in layer.parameters]
    assert len(names) == len(set(names))
    frozen = set(model.keys) - set(names)
    assert all("running_" in name for name in frozen)
    assert sum(model.layer_bytes) == model.size_bytes


@pytest.mark.parametrize("name", MODELS)
def test_computation_is_shared_out_one_to_two(name):
    model = load(name)
    assert sum(model.forward_s) == pytest.approx(model.compute_s / 3)
    assert sum(model.backward_s) == pytest.approx(model.compute_s * 2 / 3)


@pytest.mark.parametrize(
    ("name", "layer", "elems"),
    [
        ("resnet50", "stage3_conv0", 32 * (14 * 14 * 256 + 28 * 28 * 512)),  # and the shortcut's
        ("resnet50", "stage4_batchnorm9", 32 * 2048),  # pooled; stage4_batchnorm9 is the last one
        ("vgg19", "conv15", 32 * 7 * 7 * 512),
        ("sockeye", "source_embed", 64 * 30 * 512),  # every host has the target's words
        ("gpt2_small", "h.5.mlp.c_proj", 4 * 1024 * 768),
        ("gpt2_small", "h.5.mlp.c_fc", 4 * 1024 * 5 * 768),
        ("snn", "dense7", 128 * 2048),
    ],
)
def test_what_later_layers_read_crosses_a_cut(name, layer, elems):
    crossing = {one.name: one.crossing_elems for one in load(name).layers}
    assert crossing[layer] == elems
    assert [*crossing.values()][-1] == 0


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="resnet50, inception_v3"):
        load("resnet51")


def _initialized(name):
    if name == "sockeye":
        block = Sockeye(target_length=3, prefix="sockeye_")
        inputs = [mx.nd.zeros((2, 4)), mx.nd.zeros((2, 3))]
    else:
        with mx.name.NameManager():
            block = vision.resnet50_v1()
        inputs = [mx.nd.zeros((1, 3, 32, 32))]
    block.initialize()
    block(*inputs).wait_to_read()
    return block


@pytest.mark.parametrize("name", ["resnet50", "sockeye"])
def test_keys_and_shapes_are_those_of_a_real_trainer(name):
    block = _initialized(name)
    trainer = mx.gluon.Trainer(block.collect_params(), "sgd")
    model = load(name)
    assert model.keys == trainer._param2idx
    shapes = {parameter.name: parameter.shape for parameter in trainer._params}
    assert {parameter.name: parameter.shape for parameter in model.parameters} == shapes


class _Reads(nn.HybridBlock):
    """A network whose names do not sort in forward order, with a tied weight."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.first = nn.Conv2D(4, 3, prefix="z_")
            self.norm = nn.BatchNorm(prefix="y_")
            self.second = nn.Dense(5, in_units=16, use_bias=False, prefix="x_")
            self.third = nn.Dense(16, in_units=5, use_bias=False, prefix="w_")
            self.tied = nn.Dense(5, in_units=16, use_bias=False, params=self.second.params)

    def hybrid_forward(self, F, data):
        hidden = F.relu(self.norm(self.first(data)))
        return self.tied(self.third(self.second(hidden)))


def test_layers_stand_in_the_order_in_which_gluon_reads_them(monkeypatch):
    network = _Reads()
    network.initialize()
    network(mx.nd.zeros((1, 2, 4, 4)))
    read = []
    data = mx.gluon.Parameter.data

    def record(parameter, *args):
        read.append(parameter.name)
        return data(parameter, *args)

    monkeypatch.setattr(mx.gluon.Parameter, "data", record)
    network(mx.nd.zeros((1, 2, 4, 4)))
    layers, _ = trace(network, {"data": (1, 2, 4, 4)})
    traced = [parameter.name for layer in layers for parameter in layer.parameters]
    expected = [name for name in dict.fromkeys(read) if "running" not in name]
    assert traced == expected
    assert [len(layer.parameters) for layer in layers] == [2, 2, 1, 1]


def test_an_lstm_is_one_layer_that_multiplies_by_each_weight_in_each_step():
    lstm = rnn.LSTM(80, input_size=60, layout="NTC", prefix="lstm_")
    (layer,), _ = trace(lstm, {"data": (20, 50, 60)})
    assert len(layer.parameters) == 4
    weights = 4 * 80 * (60 + 80)
    assert layer.flops == pytest.approx(2 * 20 * 50 * weights, rel=0.02)  # biases make the rest


def test_figure5_leaves_its_numbers_and_its_picture(tmp_path):
    figure5.main(["--output", str(tmp_path)])
    assert (tmp_path / "figure5.json").stat().st_size > 1000
    assert (tmp_path / "figure5.png").stat().st_size > 10000
