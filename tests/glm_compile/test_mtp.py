from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from glm_compile.cache import PagedCache
from glm_compile.errors import CheckpointError, UnsupportedError
from glm_compile.mtp import GlmMoeDsaMtp
from tests.checkpoints import random_mtp, release_tensors
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model

TOLERANCE = {"rtol": 0, "atol": 1e-4}


class PlainMtp:
    """The MTP layer written out once more, one sequence, float32, no transformers and no cache.

    Rows of a sequence are [T,...]; `keys` of a step are the rows that it may attend.
    """

    def __init__(self, mtp, config):
        model_state = {f"main.{n}": t for n, t in mtp._model.state_dict().items()}
        self.w = {n.removeprefix("layer."): t for n, t in mtp.state_dict().items()} | model_state
        self.c = config

    def norm(self, x, name, eps):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.w[f"{name}.weight"]

    def rope(self, x, positions):
        """Rotate pairs (0,1), (2,3), ... of [T, heads, 64]; they stay where they were."""
        theta = self.c.rope_parameters["rope_theta"]
        frequencies = theta ** -(torch.arange(0, 64, 2) / 64)
        angles = positions[:, None, None] * frequencies
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], 32, 2).contiguous())
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2)

    def inputs(self, ids, hidden):
        eps = self.c.rms_norm_eps
        embedded = self.w["main.model.embed_tokens.weight"][ids]
        pair = torch.cat([self.norm(embedded, "enorm", eps), self.norm(hidden, "hnorm", eps)], -1)
        x = pair @ self.w["eh_proj.weight"].T
        return x, self.norm(x, "input_layernorm", eps)

    def latents(self, normed, positions):
        kv = normed @ self.w["self_attn.kv_a_proj_with_mqa.weight"].T
        latent = self.norm(kv[:, :64], "self_attn.kv_a_layernorm", 1e-6)
        return latent, self.rope(kv[:, None, 64:], positions)[:, 0]

    def select(self, normed, positions, seen):
        """Indexer: bool [S,T] of the selected keys; every key is a row of this step."""
        a = "self_attn."
        q_a = self.norm(normed @ self.w[a + "q_a_proj.weight"].T, a + "q_a_layernorm", 1e-6)
        q = (q_a @ self.w[a + "indexer.wq_b.weight"].T).view(len(normed), -1, 128)
        k = F.layer_norm(
            normed @ self.w[a + "indexer.wk.weight"].T,
            (128,),
            self.w[a + "indexer.k_norm.weight"],
            self.w[a + "indexer.k_norm.bias"],
            1e-6,
        )
        q = torch.cat([self.rope(q[..., :64], positions), q[..., 64:]], -1)
        k = torch.cat([self.rope(k[:, None, :64], positions)[:, 0], k[:, 64:]], -1)
        gates = normed @ self.w[a + "indexer.weights_proj.weight"].T / math.sqrt(q.shape[1])
        scores = torch.einsum("shd,td->sht", q, k).relu() / math.sqrt(128)
        scores = torch.einsum("sht,sh->st", scores, gates).masked_fill(~seen, -math.inf)
        chosen = torch.zeros_like(seen)
        for row, row_scores in enumerate(scores):
            order = row_scores.argsort(descending=True)[: self.c.index_topk]
            chosen[row, order] = True
        return chosen & seen

    def layer(self, x, normed, positions, latent, rotated, chosen):
        a, c = "self_attn.", self.c
        q_a = self.norm(normed @ self.w[a + "q_a_proj.weight"].T, a + "q_a_layernorm", 1e-6)
        q = (q_a @ self.w[a + "q_b_proj.weight"].T).view(len(x), c.num_attention_heads, 96)
        q_rotated = self.rope(q[..., 32:], positions)
        kv = (latent @ self.w[a + "kv_b_proj.weight"].T).view(len(latent), -1, 32 + 96)
        scores = torch.einsum("shd,thd->hst", q[..., :32], kv[..., :32])
        scores = scores + torch.einsum("shd,td->hst", q_rotated, rotated)
        scores = (scores / math.sqrt(96)).masked_fill(~chosen, -math.inf)
        attended = torch.einsum("hst,thd->shd", scores.softmax(-1), kv[..., 32:])
        x = x + attended.flatten(1) @ self.w[a + "o_proj.weight"].T
        return x + self.experts(self.norm(x, "post_attention_layernorm", c.rms_norm_eps))

    def experts(self, x):
        scores = (x @ self.w["mlp.gate.weight"].T).sigmoid()
        biased = scores + self.w["mlp.gate.e_score_correction_bias"]
        out = self.mlp(
            x, *(self.w[f"mlp.shared_experts.{p}_proj.weight"] for p in ("gate", "up", "down"))
        )
        for row in range(len(x)):
            ids = biased[row].argsort(descending=True)[: self.c.num_experts_per_tok]
            weights = scores[row, ids] / scores[row, ids].sum() * self.c.routed_scaling_factor
            for expert, weight in zip(ids, weights):
                gate, up = self.w["mlp.experts.gate_up_proj"][expert].chunk(2)
                down = self.w["mlp.experts.down_proj"][expert]
                out[row] += weight * self.mlp(x[row : row + 1], gate, up, down)[0]
        return out

    def mlp(self, x, gate, up, down):
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def output(self, x):
        return self.norm(x, "shared_head.norm", self.c.rms_norm_eps)


def next_ids(ids):
    """The token behind each position; the last position's is made up."""
    return torch.cat([ids[:, 1:], torch.randint(0, 500, (len(ids), 1))], 1)


def hidden_states(model, ids):
    """The model's last hidden states (after its final norm)."""
    return model.model(ids, use_cache=False).last_hidden_state


def empty_cache(model, batch_size=1, max_cache_len=100):
    dtype = model.model.norm.weight.dtype
    cache = PagedCache(model.config, batch_size, max_cache_len, dtype=dtype, num_mtp_layers=1)
    cache.auto_advance = False
    return cache


def positions(cache, num_tokens):
    return cache.lengths[:, None] + torch.arange(num_tokens)


def mtp_rows(cache, row, length):
    """Latents and index keys of the MTP layer that one sequence holds."""
    layer = cache.layers[-1]
    pages = cache.block_table[row].long()
    return (
        layer.latent_pages[pages].flatten(0, 1)[:length].clone(),
        layer.key_pages[pages].flatten(0, 1)[:length].clone(),
    )


class TestNumbers:
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_extend_and_three_drafts_equal_a_plain_implementation(self, attention):
        model = tiny_model(attention=attention)
        mtp = random_mtp(model)
        plain = PlainMtp(mtp, model.config)
        length = 40
        ids = torch.randint(0, 500, (1, length))
        tokens, hidden = next_ids(ids), hidden_states(model, ids)

        cache = empty_cache(model)
        out, topk = mtp.extend(tokens, hidden, positions(cache, length), None, cache)
        cache.advance(length)
        x, normed = plain.inputs(tokens[0], hidden[0])
        at = torch.arange(length)
        seen = at[:, None] >= at
        chosen = plain.select(normed, at, seen)
        latent, rotated = plain.latents(normed, at)
        expected = plain.output(plain.layer(x, normed, at, latent, rotated, chosen))
        torch.testing.assert_close(out[0], expected, **TOLERANCE)
        assert topk.dtype == torch.int32 and topk.shape == (1, length, 8)
        assert set(topk[0, -1].tolist()) == set(chosen[-1].nonzero().flatten().tolist())

        seed = mtp.gather_seed(topk[:, -1:], cache)
        hidden_B1C, plain_hidden = out[:, -1:], expected[-1:]
        for index in range(3):
            token = torch.randint(0, 500, (1, 1))
            at = torch.tensor([length + index])
            hidden_B1C = mtp.draft(token, hidden_B1C, at[None], seed)
            x, normed = plain.inputs(token[0], plain_hidden)
            plain_hidden = plain.output(plain.layer(x, normed, at, latent, rotated, chosen[-1:]))
            torch.testing.assert_close(hidden_B1C[0], plain_hidden, **TOLERANCE)
            logits = plain_hidden @ plain.w["main.lm_head.weight"].T
            torch.testing.assert_close(mtp.compute_logits(hidden_B1C)[0], logits, **TOLERANCE)

    def test_a_draft_sees_the_seeds_positions_alone(self):
        model = tiny_model()
        mtp = random_mtp(model)
        ids = torch.randint(0, 500, (1, 30))
        cache = empty_cache(model)
        out, topk = mtp.extend(
            next_ids(ids), hidden_states(model, ids), positions(cache, 30), None, cache
        )
        cache.advance(30)
        topk = topk[:, -1:]

        def draft():
            seed = mtp.gather_seed(topk, cache)
            return mtp.draft(torch.tensor([[5]]), out[:, -1:], torch.tensor([[30]]), seed)

        before = draft()
        pages = cache.layers[-1].latent_pages.view(-1, 128)
        outside = torch.ones(len(pages), dtype=torch.bool)
        outside[topk.flatten().long()] = False
        pages[outside] = 1e4
        assert torch.equal(draft(), before)
        pages[topk[0, 0, 0]] += 1
        assert not torch.equal(draft(), before)

    def test_modules_that_were_replaced_are_called(self):
        """A norm of another class, a hook: what they do is what counts."""
        model = tiny_model()
        mtp = random_mtp(model)
        ids, hidden = torch.randint(0, 500, (1, 9)), torch.randn(1, 9, model.config.hidden_size)

        def joined():
            return mtp._join(ids, hidden)

        before = joined()
        norm = torch.nn.RMSNorm(model.config.hidden_size, eps=mtp.enorm.variance_epsilon)
        norm.weight.data = mtp.enorm.weight.data
        mtp.enorm = norm
        torch.testing.assert_close(joined(), before)
        hook = model.model.embed_tokens.register_forward_hook(lambda *call: call[-1] * 0)
        width = model.config.hidden_size
        assert (joined()[..., :width] == 0).all()
        torch.testing.assert_close(joined()[..., width:], before[..., width:])
        hook.remove()
        torch.testing.assert_close(joined(), before)

    def test_padding_of_a_short_seed_adds_nothing(self):
        model = tiny_model()
        mtp = random_mtp(model)
        ids = torch.randint(0, 500, (1, 5))
        cache = empty_cache(model)
        out, topk = mtp.extend(
            next_ids(ids), hidden_states(model, ids), positions(cache, 5), None, cache
        )
        cache.advance(5)
        rest = (torch.tensor([[5]]), out[:, -1:], torch.tensor([[5]]))
        expected = mtp.draft(*rest, mtp.gather_seed(topk[:, -1:], cache))
        for padding in (-1, 4, 5):
            padded = torch.tensor([[[0, 1, 2, 3, 4] + [padding] * 3]], dtype=torch.int32)
            found = mtp.draft(*rest, mtp.gather_seed(padded, cache))
            torch.testing.assert_close(found, expected, **TOLERANCE)


class TestCacheRows:
    def test_rows_after_partial_acceptance_equal_rebuilt_ones(self):
        """Blocks of 4 with 1 to 4 kept: rejected rows are overwritten by the next block."""
        model = tiny_model()
        mtp = random_mtp(model)
        final = [torch.randint(0, 500, (1, 60)) for _ in range(2)]
        cache = empty_cache(model, batch_size=2)
        prompt = torch.cat([ids[:, :20] for ids in final])
        hidden = hidden_states(model, prompt)
        tokens = torch.cat([ids[:, 1:21] for ids in final])
        mtp.extend(tokens, hidden, positions(cache, 20), None, cache)
        cache.advance(torch.tensor([20, 12]))
        held = [20, 12]
        for kept in ([1, 4], [3, 2], [4, 1], [2, 3]):
            rows, token_rows = [], []
            for row, (start, count) in enumerate(zip(held, kept)):
                ids = final[row][:, : start + 4].clone()
                ids[:, start + count :] += 3  # rejected drafts
                rows.append(hidden_states(model, ids)[:, start:])
                following = final[row][:, start + 1 : start + 5].clone()
                following[:, count:] += 5
                token_rows.append(following)
            mtp.extend(torch.cat(token_rows), torch.cat(rows), positions(cache, 4), None, cache)
            cache.advance(torch.tensor(kept))
            held = [a + b for a, b in zip(held, kept)]
        assert cache.lengths.tolist() == held
        for row, length in enumerate(held):
            alone = empty_cache(model)
            ids = final[row]
            hidden = hidden_states(model, ids[:, :length])
            mtp.extend(ids[:, 1 : length + 1], hidden, positions(alone, length), None, alone)
            for found, expected in zip(mtp_rows(cache, row, length), mtp_rows(alone, 0, length)):
                torch.testing.assert_close(found, expected, **TOLERANCE)

    def test_a_draft_writes_nothing(self):
        model = tiny_model()
        mtp = random_mtp(model)
        cache = empty_cache(model, batch_size=2)
        ids = torch.randint(0, 500, (2, 20))
        out, topk = mtp.extend(
            next_ids(ids), hidden_states(model, ids), positions(cache, 20), None, cache
        )
        cache.advance(torch.tensor([20, 15]))
        before = copy.deepcopy(cache)
        rows = torch.tensor([19, 14])
        at = torch.arange(2), rows
        seed = mtp.gather_seed(topk[at][:, None], cache)
        mtp.draft(ids[:, :1], out[at][:, None], cache.lengths[:, None], seed)
        for layer, layer_before in zip(cache.layers, before.layers):
            assert torch.equal(layer.latent_pages, layer_before.latent_pages)
            if layer.key_pages is not None:
                assert torch.equal(layer.key_pages, layer_before.key_pages)
        assert torch.equal(cache.lengths, before.lengths)

    def test_without_index_share_each_step_writes_its_row(self):
        config = tiny_config(index_share_for_mtp_iteration=False)
        model = tiny_model(config)
        mtp = random_mtp(model)
        assert not mtp.is_index_shared and random_mtp(tiny_model()).is_index_shared
        ids = torch.randint(0, 500, (1, 20))
        tokens, hidden = next_ids(ids), hidden_states(model, ids)
        cache = empty_cache(model)
        out, _ = mtp.extend(tokens, hidden, positions(cache, 20), None, cache)
        cache.advance(20)
        draft = torch.tensor([[7]])
        step, _ = mtp.extend(draft, out[:, -1:], positions(cache, 1), None, cache)
        cache.advance(1)

        alone = empty_cache(model)
        both = mtp.extend(
            torch.cat([tokens, draft], 1),
            torch.cat([hidden, out[:, -1:]], 1),
            positions(alone, 21),
            None,
            alone,
        )[0]
        torch.testing.assert_close(step, both[:, -1:], **TOLERANCE)
        for found, expected in zip(mtp_rows(cache, 0, 21), mtp_rows(alone, 0, 21)):
            torch.testing.assert_close(found, expected, **TOLERANCE)


class TestCompiled:
    def test_extend_and_five_drafts_are_one_graph_each(self):
        model = tiny_model()
        mtp = random_mtp(model)
        num_compilations = 0

        def backend(graph_module, example_inputs):
            nonlocal num_compilations
            num_compilations += 1
            from torch._dynamo.backends.debugging import aot_eager

            return aot_eager(graph_module, example_inputs)

        def drafts(token, hidden, cache, topk):
            chain = []
            seed = mtp.gather_seed(topk, cache)
            for index in range(5):
                hidden = mtp.draft(token, hidden, cache.lengths[:, None] + index, seed)
                token = mtp.compute_logits(hidden).argmax(-1)
                chain.append(token)
            return torch.cat(chain, 1)

        extend = torch.compile(mtp.extend, backend=backend, fullgraph=True)
        compiled_drafts = torch.compile(drafts, backend=backend, fullgraph=True)
        cache, eager_cache = empty_cache(model, 2), empty_cache(model, 2)
        for kept in ([6, 1], [2, 5], [4, 4]):
            ids = torch.randint(0, 500, (2, 6))
            hidden = torch.randn(2, 6, 128)
            row = torch.arange(2), torch.tensor(kept) - 1
            results = []
            for run, run_drafts, own in (
                (extend, compiled_drafts, cache),
                (mtp.extend, drafts, eager_cache),
            ):
                out, topk = run(ids, hidden, positions(own, 6), None, own)
                own.advance(torch.tensor(kept))
                results.append(run_drafts(ids[:, :1], out[row][:, None], own, topk[row][:, None]))
            assert torch.equal(*results)
        assert num_compilations == 2


class TestModule:
    def test_the_draft_variant_shares_every_parameter(self):
        mtp = random_mtp(tiny_model())
        own = {id(tensor) for tensor in [*mtp.parameters(), *mtp.buffers()]}
        drafts = [*mtp._draft_layer.parameters(), *mtp._draft_layer.buffers()]
        assert drafts and all(id(tensor) in own for tensor in drafts)
        assert mtp._draft_layer.self_attn.indexer is None
        assert not any("draft" in name or "lm_head" in name for name in mtp.state_dict())
        names = [name for name, _ in mtp.named_parameters()]
        assert len(names) == len(set(names)) == len({id(p) for p in mtp.parameters()})

    def test_casts_reach_both_variants(self):
        model = tiny_model().to(torch.bfloat16)
        mtp = GlmMoeDsaMtp(tiny_model()).to(torch.bfloat16)
        mtp.__dict__["_model"] = model
        cache = empty_cache(model)
        hidden = torch.randn(1, 12, 128, dtype=torch.bfloat16)
        ids = torch.randint(0, 500, (1, 12))
        for parameter in mtp.parameters():
            parameter.uniform_(-0.1, 0.1)
        out, topk = mtp.extend(ids, hidden, positions(cache, 12), None, cache)
        cache.advance(12)
        at = torch.tensor([[12]])
        seed = mtp.gather_seed(topk[:, -1:], cache)
        assert mtp.draft(ids[:, :1], out[:, -1:], at, seed).isfinite().all()

    def test_dtypes_follow_the_model(self):
        model = tiny_model(dtype=torch.bfloat16)
        gate = model.model.layers[-1].mlp.gate
        for dtype in (torch.float32, torch.bfloat16):
            gate.weight.data = gate.weight.data.to(dtype)
            mtp = GlmMoeDsaMtp(model)
            assert mtp.layer.mlp.gate.weight.dtype == dtype
            assert mtp.layer.mlp.gate.e_score_correction_bias.dtype == torch.float32
            rest = {n: p.dtype for n, p in mtp.named_parameters() if "mlp.gate." not in n}
            assert set(rest.values()) == {torch.bfloat16}
        assert torch.get_default_dtype() == torch.float32

    def test_it_needs_no_memory_on_meta(self):
        mtp = GlmMoeDsaMtp(tiny_model(), device=torch.device("meta"))
        assert all(tensor.is_meta for tensor in [*mtp.parameters(), *mtp.buffers()])
        assert not mtp.training and not any(p.requires_grad for p in mtp.parameters())

    def test_several_layers_are_refused(self):
        with pytest.raises(UnsupportedError, match="2 MTP layers"):
            GlmMoeDsaMtp(tiny_model(tiny_config(num_nextn_predict_layers=2)))


class TestTensors:
    def tensors(self, model, mtp):
        prefix = f"model.layers.{model.config.num_hidden_layers}."
        released = release_tensors(model, mtp)
        return {n.removeprefix(prefix): t for n, t in released.items() if n.startswith(prefix)}

    def test_experts_come_apart_or_merged(self):
        model = tiny_model()
        source = random_mtp(model)
        merged = {n.removeprefix("layer."): t for n, t in source.state_dict().items()}
        apart = self.tensors(model, source)
        assert "mlp.experts.7.up_proj.weight" in apart and "mlp.experts.gate_up_proj" in merged
        for tensors in (apart, merged):
            mtp = GlmMoeDsaMtp(model, device=torch.device("meta"))
            mtp.load_tensors(tensors)
            for name, tensor in source.state_dict().items():
                assert torch.equal(mtp.state_dict()[name], tensor), name

    def test_all_faults_are_listed(self):
        model = tiny_model()
        tensors = self.tensors(model, random_mtp(model))
        del tensors["enorm.weight"], tensors["mlp.experts.3.up_proj.weight"]
        tensors["surprise.weight"] = torch.zeros(1)
        tensors["eh_proj.weight"] = torch.zeros(128, 128)
        mtp = GlmMoeDsaMtp(model)
        before = mtp.hnorm.weight.clone()
        tensors["hnorm.weight"] = before + 1
        with pytest.raises(CheckpointError) as caught:
            mtp.load_tensors(tensors)
        for text in (
            "missing tensor enorm.weight",
            "missing tensor mlp.experts.3.up_proj.weight",
            "unexpected tensor surprise.weight",
            "tensor eh_proj.weight has shape [128, 128], the config makes it [128, 256]",
        ):
            assert text in str(caught.value)
        assert torch.equal(mtp.hnorm.weight, before)

    @pytest.mark.parametrize("is_equal", [True, False])
    def test_an_own_embedding_and_head_are_kept_if_they_differ(self, is_equal):
        model = tiny_model()
        source = random_mtp(model)
        tensors = self.tensors(model, source)
        shift = 0.0 if is_equal else 0.5
        tensors["embed_tokens.weight"] = model.model.embed_tokens.weight + shift
        tensors["shared_head.head.weight"] = model.lm_head.weight * (1 - shift)
        mtp = GlmMoeDsaMtp(model)
        mtp.load_tensors(tensors)
        hidden = torch.randn(1, 1, 128)
        expected = F.linear(hidden, tensors["shared_head.head.weight"])
        torch.testing.assert_close(mtp.compute_logits(hidden), expected)
        assert (mtp.embed_tokens is None) == (mtp.shared_head.head is None) == is_equal
        cache, other = empty_cache(model), empty_cache(model)
        ids = torch.tensor([[3]])
        at = torch.tensor([[0]])
        out = mtp.extend(ids, hidden, at, None, cache)[0]
        assert torch.equal(out, source.extend(ids, hidden, at, None, other)[0]) == is_equal


def test_a_cache_without_mtp_rows_is_refused_with_the_reason():
    model = tiny_model()
    cache = PagedCache(model.config, 1, 64)
    ids, at = torch.tensor([[3]]), torch.tensor([[0]])
    with pytest.raises(ValueError, match=r"0 MTP layers, but layer 4 writes.*num_mtp_layers=1"):
        random_mtp(model).extend(ids, torch.randn(1, 1, 128), at, None, cache)


def test_the_model_and_its_mtp_layer_fill_one_cache():
    """Verify and extend write the same positions; one advance moves both."""
    model = tiny_model()
    mtp = random_mtp(model)
    cache = empty_cache(model)
    ids = torch.randint(0, 500, (1, 20))
    hidden = model.model(
        ids,
        attention_mask={"indexed_attention": cache.causal_mask(20)},
        position_ids=positions(cache, 20),
        **{CACHE_ARGUMENT: cache},
    ).last_hidden_state
    mtp.extend(next_ids(ids), hidden, positions(cache, 20), None, cache)
    cache.advance(20)
    for layer in cache.layers:
        rows = layer.latent_pages.flatten(0, 1)
        assert rows[:20].any(-1).all() and not rows[20:].any()


@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_that_were_counted_already_are_refused(compiled):
    """Rows of the MTP layer would lie behind those of the tokens that they belong to."""
    model = tiny_model()
    mtp = random_mtp(model)
    ids = torch.randint(0, 500, (1, 9))
    cache = PagedCache(model.config, 1, 64, num_mtp_layers=1)
    model(ids, **{CACHE_ARGUMENT: cache})

    def extend(ids, hidden):
        return mtp.extend(ids, hidden, positions(cache, 9), None, cache)[0]

    called = torch.compile(extend, backend="aot_eager", fullgraph=True) if compiled else extend
    arguments = next_ids(ids), hidden_states(model, ids)
    with pytest.raises(Exception, match=r"auto_advance has counted .* cache.auto_advance = False"):
        called(*arguments)
    assert cache.lengths.tolist() == [9]
    cache.crop(-9)
    fresh = empty_cache(model)
    expected, _ = mtp.extend(*arguments, positions(fresh, 9), None, fresh)
    torch.testing.assert_close(called(*arguments), expected, **TOLERANCE)
