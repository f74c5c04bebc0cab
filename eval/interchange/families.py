"""The families of transformers that a run can be a checkpoint of, and what each of them can express.

|                                | olmoe          | mixtral | qwen3_moe | choir (its own modelling file) |
|--------------------------------|----------------|---------|-----------|--------------------------------|
| served by                      | top-k          | top-k   | top-k     | thresholds, top-k, or dense    |
| weights of a token renormalised | either        | always  | either    | either                         |
| norm of queries and keys       | over the width | none    | per head  | any                            |
| head_dim                       | width / heads  | free    | free      | free                           |
| dense layers                   | no             | no      | yes       | yes                            |
| shared expert, sigmoid scores, route_scale | no | no      | no        | yes                            |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eval.interchange.names import Names
from eval.interchange.served import InterchangeError, Served, served
from moe.config import is_moe_layer
from moe.loss_conventions import convert_balance_coefficient
from training.config import Config

REMOTE_CODE = {
    "AutoConfig": "configuration_choir.ChoirConfig",
    "AutoModel": "modeling_choir.ChoirModel",
    "AutoModelForCausalLM": "modeling_choir.ChoirForCausalLM",
}


@dataclass(frozen=True)
class Family:
    """One model of transformers.

    Attributes:
        name: its `model_type`.
        config_class: in the package transformers.
        model_class: the same.
        names: of the tensors of a mixture.
        qk_norm: the only `model.qk_norm` it computes.
        expert_width: its key for the hidden width of an expert.
        fixed: keys of its configuration that change what it computes in a way that Choir has not, with the values
            that switch them off.
        free_head_dim, dense_layers: whether it has them.
        always_renormalizes: see the table.
    """

    name: str
    config_class: str
    model_class: str
    names: Names
    qk_norm: str
    expert_width: str
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    free_head_dim: bool = True
    dense_layers: bool = False
    always_renormalizes: bool = False

    def misfits(self, config: Config) -> list[str]:
        """The keys of a run that this family cannot express, each with its reason; empty if it is a run of it."""
        model, moe = config.model, config.moe
        found = _routing_misfits(served(moe), moe.router)
        found += [f"moe.shared_width = {moe.shared_width} (no shared expert)"] if moe.shared_width else []
        found += [f"moe.route_scale = {moe.route_scale} (only 1)"] if moe.route_scale != 1 else []
        if self.always_renormalizes and not served(moe).renormalize:
            found.append("moe.renormalize = false (always renormalises)")
        if model.qk_norm != self.qk_norm:
            found.append(f'model.qk_norm = "{model.qk_norm}" (only "{self.qk_norm}")')
        if not self.free_head_dim and model.resolved_head_dim * model.heads != model.width:
            found.append(
                f"model.head_dim = {model.resolved_head_dim} (only width / heads = {model.width}/{model.heads})"
            )
        if not self.dense_layers:
            dense = [layer for layer in range(model.layers) if not is_moe_layer(model, layer)]
            keys = f"model.dense_layers = {model.dense_layers}, model.moe_every = {model.moe_every}"
            found += [f"{keys} (no dense layers)"] if dense else []
        return found

    def values(self, config: Config) -> dict[str, Any]:
        """Its configuration for a run that fits, without token ids."""
        model, moe = config.model, config.moe
        mixtures = [layer for layer in range(model.layers) if is_moe_layer(model, layer)]
        values = {
            **_common_values(config),
            "rope_parameters": {"rope_type": "default", "rope_theta": float(model.rope_base)},
            "num_experts_per_tok": moe.experts_per_token,
            # One of the two names is an alias of the other.
            ("num_local_experts" if self.name == "mixtral" else "num_experts"): moe.num_experts,
            "router_aux_loss_coef": convert_balance_coefficient(
                moe.balance_coefficient, "choir", "transformers", moe.experts_per_token, len(mixtures)
            ),
            "pad_token_id": None,
        }
        if self.dense_layers:
            values["intermediate_size"] = _dense_width(config)
            values["mlp_only_layers"] = [layer for layer in range(model.layers) if layer not in mixtures]
            values["decoder_sparse_step"] = 1
        if self.free_head_dim:
            values["head_dim"] = model.resolved_head_dim
        if not self.always_renormalizes:
            values["norm_topk_prob"] = served(moe).renormalize
        return values | {self.expert_width: moe.expert_width}

    def sections(self, found: Any) -> dict[str, dict[str, Any]]:
        """The sections `model` and `moe` of a run from this family's configuration object.

        Raises:
            InterchangeError: it computes something that Choir has not; all such keys are named.
        """
        self._refuse(found)
        heads, layers = found.num_attention_heads, found.num_hidden_layers
        model = {
            "vocabulary_size": found.vocab_size,
            "width": found.hidden_size,
            "layers": layers,
            "heads": heads,
            "kv_heads": found.num_key_value_heads,
            "head_dim": getattr(found, "head_dim", None) or found.hidden_size // heads,
            "qk_norm": self.qk_norm,
            "tie_embeddings": bool(found.tie_word_embeddings),
            "rope_base": float(found.rope_parameters["rope_theta"]),
            "norm_epsilon": float(found.rms_norm_eps),
        }
        mixtures = self._mixtures(found)
        if self.dense_layers and len(mixtures) < layers:
            model |= _dense_keys(mixtures, layers) | {"feed_forward_width": found.intermediate_size}
        balance = convert_balance_coefficient(
            float(found.router_aux_loss_coef), "transformers", "choir", found.num_experts_per_tok, len(mixtures)
        )
        moe = {
            "router": "token_choice",
            "num_experts": found.num_experts,
            "experts_per_token": found.num_experts_per_tok,
            "expert_width": getattr(found, self.expert_width),
            "renormalize": self.always_renormalizes or bool(found.norm_topk_prob),
            "balance_coefficient": balance,
        }
        return {"model": model, "moe": moe}

    def _refuse(self, found: Any) -> None:
        faults = []
        for key, allowed in self.fixed.items():
            value = getattr(found, key, allowed[0])
            if value not in allowed:
                faults.append(f"{key} = {value!r} (only {allowed[0]!r})")
        rope = dict(found.rope_parameters)
        if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            faults.append(f"rope_parameters = {rope} (only the default type, over whole heads)")
        head_dim = getattr(found, "head_dim", None) or found.hidden_size // found.num_attention_heads
        if not self.free_head_dim and head_dim * found.num_attention_heads != found.hidden_size:
            faults.append(f"head_dim = {head_dim} (only hidden_size / num_attention_heads)")
        if getattr(found, "quantization_config", None):
            faults.append("quantization_config (only unquantised weights)")
        if faults:
            raise InterchangeError(f"{self.name}: Choir's model does not have {'; '.join(faults)}")

    def _mixtures(self, found: Any) -> list[int]:
        """Which layers have experts."""
        layers = range(found.num_hidden_layers)
        if not self.dense_layers:
            return list(layers)
        return [
            layer
            for layer in layers
            if layer not in found.mlp_only_layers and (layer + 1) % found.decoder_sparse_step == 0
        ]


_ACTIVATION = {"hidden_act": ("silu", "swish"), "attention_dropout": (0.0,)}

FAMILIES = {
    family.name: family
    for family in (
        Family(
            "olmoe",
            "OlmoeConfig",
            "OlmoeForCausalLM",
            Names(),
            "width",
            "intermediate_size",
            _ACTIVATION | {"attention_bias": (False,), "clip_qkv": (None,), "sliding_window": (None,)},
            free_head_dim=False,
        ),
        Family(
            "mixtral",
            "MixtralConfig",
            "MixtralForCausalLM",
            Names("block_sparse_moe", "gate", ("w1", "w3", "w2")),
            "none",
            "intermediate_size",
            _ACTIVATION | {"sliding_window": (None,), "router_jitter_noise": (0.0,)},
            always_renormalizes=True,
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeConfig",
            "Qwen3MoeForCausalLM",
            Names(),
            "head",
            "moe_intermediate_size",
            _ACTIVATION | {"attention_bias": (False,), "use_sliding_window": (False,)},
            dense_layers=True,
        ),
    )
}

CHOIR = "choir"
CHOIR_NAMES = Names(router="router", cutoffs=True)
EXPORTABLE = (*FAMILIES, CHOIR)


def choose_family(config: Config) -> str:
    """The family a run is a checkpoint of: one of transformers' where there is one, Choir's own under thresholds.

    Raises:
        InterchangeError: there is none; says of each family what does not fit.
    """
    if served(config.moe).selection == "threshold":
        return CHOIR
    reasons = {name: family.misfits(config) for name, family in FAMILIES.items()}
    for name, misfits in reasons.items():
        if not misfits:
            return name
    listed = "; ".join(f"{name}: {', '.join(misfits)}" for name, misfits in reasons.items())
    raise InterchangeError(
        f"no family of transformers expresses this run ({listed}); --family choir writes a folder with a modelling "
        "file of its own, which does"
    )


def require_fit(config: Config, name: str) -> None:
    """Refuse a family that cannot express a run.

    Raises:
        InterchangeError: names the keys, and the family that fits if there is one.
    """
    if name == CHOIR:
        served(config.moe)
        _dense_width(config)
        return
    if name not in FAMILIES:
        raise InterchangeError(f"--family {name}: must be one of {', '.join(EXPORTABLE)}")
    if misfits := FAMILIES[name].misfits(config):
        fitting = next((other for other, family in FAMILIES.items() if not family.misfits(config)), CHOIR)
        raise InterchangeError(f"--family {name} cannot express {', '.join(misfits)}; --family {fitting} can")


def choir_values(config: Config) -> dict[str, Any]:
    """Configuration of Choir's own modelling file, for any run that is served by thresholds, top-k or is dense."""
    model, moe = config.model, config.moe
    how = served(moe)
    return {
        **_common_values(config),
        "intermediate_size": _dense_width(config),
        "moe_intermediate_size": moe.expert_width,
        "shared_expert_intermediate_size": moe.shared_width,
        "head_dim": model.resolved_head_dim,
        "qk_norm": model.qk_norm,
        "mlp_only_layers": [n for n in range(model.layers) if not (moe.is_moe and is_moe_layer(model, n))],
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "routing": "top_k" if how.selection == "top_k" else "threshold",
        "score_function": how.score,
        "norm_topk_prob": how.renormalize,
        "routed_scaling_factor": moe.route_scale,
        "rope_theta": float(model.rope_base),
        "auto_map": REMOTE_CODE,
        "architectures": ["ChoirForCausalLM"],
    }


def _common_values(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "vocab_size": model.vocabulary_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.resolved_kv_heads,
        "rms_norm_eps": model.norm_epsilon,
        "max_position_embeddings": config.training.sequence_length,
        "tie_word_embeddings": model.tie_embeddings,
        "dtype": "float32",
    }


def _dense_width(config: Config) -> int:
    """Hidden width of the layers without experts.

    Raises:
        InterchangeError: they differ, as a dense twin's can.
    """
    model, moe = config.model, config.moe
    others = model.feed_forward_width or moe.dense_width
    widths = {moe.dense_width if is_moe_layer(model, layer) else others for layer in range(model.layers)}
    if moe.is_moe or len(widths) == 1:
        return others if moe.is_moe else widths.pop()
    raise InterchangeError(
        f"model.feed_forward_width = {model.feed_forward_width}: the dense twin's other layers are {moe.dense_width} "
        "wide, and a checkpoint's dense layers have one width"
    )


def _routing_misfits(how: Served, router: str) -> list[str]:
    if how.selection == "dense":
        return ['moe.router = "dense" (no experts)']
    if how.selection == "threshold":
        return [f'moe.router = "{router}" served by thresholds (a token takes its k best experts)']
    return [f'moe.score = "{how.score}" (only a softmax)'] if how.score != "softmax" else []


def _dense_keys(mixtures: list[int], layers: int) -> dict[str, int]:
    """`dense_layers` and `moe_every` that give these mixture layers.

    Raises:
        InterchangeError: none do.
    """
    if mixtures:
        first = mixtures[0]
        for every in range(1, layers + 1):
            if list(range(first, layers, every)) == mixtures:
                return {"dense_layers": first, "moe_every": every}
    raise InterchangeError(
        f"the layers with experts are {mixtures or 'none'} of {layers} (mlp_only_layers, decoder_sparse_step): Choir's "
        "begin somewhere and then come at equal distances"
    )
