"""Which stretches of a graph are found to be alike, and which are not."""

import torch

import moe_ops
from inductor_passes.pipeline import PIPELINE
from inductor_passes.repeats import MIN_REPEATS, Repeats, repeats
from tests.passes.capture import rewrite
from tests.passes.moe import MANY_TOKENS
from tests.passes.stacks import block, cached, normed, paged, stack, tokens, weights


def found(function, *args, **kwargs) -> Repeats | None:
    return repeats(rewrite(function, *args, passes=PIPELINE, **kwargs).graph)


def calls(stretch) -> list[str]:
    return [str(node.target) for node in stretch.nodes]


def products(stretch) -> int:
    return sum(name.startswith("moe.grouped_gemm") for name in calls(stretch))


def test_alike_layers_are_found():
    result = found(stack, tokens(MANY_TOKENS), weights(7))
    assert result is not None and len(result.stretches) >= 6
    first = result.stretches[0]
    assert products(first) == 2 and calls(first).count("aten.mm.default") == 2
    assert all(calls(each) == calls(first) for each in result.stretches)
    nodes = [node for each in result.stretches for node in each.nodes]
    assert len(set(nodes)) == len(nodes)


def test_routers_that_keep_the_best_groups_are_in_the_stretches():
    routing = moe_ops.RoutingConfig(2, num_groups=2, topk_groups=1)

    def grouped(x, layers):
        for mixing, router, w13, w2 in layers:
            y = normed(x + normed(x) @ mixing)
            x = x + moe_ops.fused_moe(y, y @ router.T, w13, w2, routing)
        return x

    layers = [(mixing, router[:4], w13[:4], w2[:4]) for mixing, router, w13, w2 in weights(7)]
    result = found(grouped, tokens(MANY_TOKENS), layers)
    assert len(result.stretches) >= 6
    assert all(products(each) == 2 and "aten.scatter.value" in calls(each) for each in result.stretches)


def test_borders_lie_behind_calls_where_two_values_are_alive():
    result = found(stack, tokens(MANY_TOKENS), weights(7))
    for each, following in zip(result.stretches, result.stretches[1:], strict=False):
        given = [node for node in following.inputs if node in each.nodes]
        assert len(given) == 2 and [each.nodes[place] for place in result.outputs] == given
        source = next(
            node for node in given if "mm" in str(node.target) or "grouped_gemm" in str(node.target)
        )
        assert all(user in following.nodes for user in source.users)


def test_few_layers_are_left():
    assert MIN_REPEATS == 4
    assert found(stack, tokens(), weights(3)) is None


def test_a_symbolic_number_of_tokens():
    x = tokens()
    torch._dynamo.mark_dynamic(x, 0)
    assert len(found(stack, x, weights(7)).stretches) >= 5


def test_a_layer_that_is_put_together_otherwise_is_none_of_them():
    def multiplied(x, layers):
        for index, (first, second) in enumerate(layers):
            x = normed(x @ first) @ (first if index == 3 else second)
        return x

    square = [tuple(torch.randn(16, 16) for _ in range(2)) for _ in range(9)]
    result = found(multiplied, tokens(), square)
    assert len(result.stretches) == 8
    assert all(len(each.inputs) == 3 for each in result.stretches)  # the fourth reads one weight twice


def test_who_reads_what_counts():
    def differences(x, layers):
        for index, (first, second) in enumerate(layers):
            y, z = x @ first, x @ second
            x = normed(z - y if index == 4 else y - z)
        return x

    square = [tuple(torch.randn(16, 16) for _ in range(2)) for _ in range(9)]
    result = found(differences, tokens(), square)
    turned = [node for each in result.stretches for node in each.nodes if "sub" in str(node.target)]
    assert 7 <= len(result.stretches) <= 8
    orders = {
        tuple((*each.inputs, *each.nodes).index(source) for source in node.args)
        for node, each in zip(turned, result.stretches, strict=True)
    }
    assert len(orders) == 1


def test_sizes_count():
    def multiplied(x, layers):
        for first, second in layers:
            x = normed(x @ first).sin() @ second
        return x

    widths = [8, 24] * 5
    layers = [(torch.randn(16, width), torch.randn(width, 16)) for width in widths]
    result = found(multiplied, tokens(), layers)
    assert all(calls(each).count("aten.mm.default") == 4 for each in result.stretches)


def test_layers_in_turns_are_alike_in_pairs():
    layers = weights(10)
    layers[1::2] = [(a, b[:3], c[:3], d[:3]) for a, b, c, d in layers[1::2]]
    result = found(stack, tokens(MANY_TOKENS), layers)
    assert len(result.stretches) == 5
    assert all(products(each) == 4 for each in result.stretches)


def test_another_number_in_each_layer_leaves_none_alike():
    def scaled(x, layers):
        for index, each in enumerate(layers):
            x = block(x, each) * (1.5 + index)
        return x

    assert found(scaled, tokens(), weights(7)) is None


def test_one_and_true_are_not_the_same():
    def summed(x, layers):
        for index, (first, second) in enumerate(layers):
            y = (x @ first).sum(-1, keepdim=bool(index % 2 == 0))
            x = normed(x) @ second + (y if index % 2 == 0 else y.unsqueeze(-1))
        return x

    square = [tuple(torch.randn(16, 16) for _ in range(2)) for _ in range(9)]
    result = found(summed, tokens(), square)
    assert all(sum("aten.sum" in name for name in calls(each)) == 2 for each in result.stretches)


def test_what_changes_an_input_stays_where_it_is():
    def cached(x, layers, caches):
        for each, cache in zip(layers, caches, strict=True):
            mixed = x @ each[0]
            cache[:9] = mixed.sin()
            x = block(x + cache.sum(0), each)
        return x

    caches = [torch.zeros(12, 16) for _ in range(7)]
    result = found(cached, tokens(), weights(7), caches)
    assert len(result.stretches) >= 5
    changed = {
        node.args[1] for node in result.stretches[0].nodes[0].graph.nodes if "copy_" in str(node.target)
    }
    assert len(changed) == 7 and not changed & {node for each in result.stretches for node in each.nodes}


def test_a_layer_around_what_stays_is_left():
    """What reads the layer's first half, and is read by its second, cannot run before or behind a function of both."""

    def cached(x, layers, cache):
        for index, each in enumerate(layers):
            y = normed(x @ each[0])
            z = torch.cumsum(y, 0)
            if index == 4:
                cache[:9] = y
                z = z + cache[1:10]
            else:
                z = z + x
            x = normed(z @ each[1])
        return x

    layers = [(torch.randn(16, 16), torch.randn(16, 16)) for _ in range(9)]
    result = found(cached, tokens(), layers, torch.zeros(12, 16))
    assert result is None or all(
        "index_put" not in name and "copy_" not in name and "scatter" not in name
        for each in result.stretches
        for name in calls(each)
    )


def test_what_changes_a_tensor_is_in_the_midst_of_no_stretch():
    graph = rewrite(stack, tokens(), weights(8), passes=PIPELINE).graph
    for each in repeats(graph).stretches:
        weight = next(node for node in each.inputs if node.op == "placeholder")
        with graph.inserting_before(each.nodes[20]):
            graph.call_function(torch.ops.aten.copy_.default, (weight, weight)).meta["val"] = weight.meta[
                "val"
            ]
    places = {node: place for place, node in enumerate(graph.nodes)}
    changes = [
        places[node] for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    ]
    result = repeats(graph)
    assert result is not None
    for each in result.stretches:
        assert not any(places[each.nodes[0]] < place < places[each.nodes[-1]] for place in changes)


def test_random_numbers_are_not_drawn_by_a_function():
    def noisy(x, layers):
        for each in layers:
            x = block(x + torch.rand_like(x), each)
        return x

    result = found(noisy, tokens(), weights(7))
    drawing = ("rand", "seed", "random")
    assert result is None or not any(
        word in name for each in result.stretches for name in calls(each) for word in drawing
    )


def test_a_view_of_an_input_that_others_read_stays_outside():
    def turned(x, layers):
        views = []
        for each in layers:
            y = x @ each[0].T
            views.append(each[0].T)
            x = normed(y + x) @ each[1].T @ each[1]
        return x, [view.sin() for view in views]

    layers = [(torch.randn(16, 16), torch.randn(4, 16)) for _ in range(7)]
    result = found(turned, tokens(), layers)
    outputs = [result.stretches[0].nodes[place] for place in result.outputs]
    assert len(result.stretches) >= 6 and not any("permute" in str(node.target) for node in outputs)
    assert calls(result.stretches[0]).count("aten.mm.default") == 3  # all of a layer


def gathered(result) -> list[int]:
    """How often each stretch gathers of caches."""
    caches = (24, tokens().shape[1])
    return [
        sum(
            "aten.index.Tensor" in str(node.target) and node.args[0].meta["val"].shape == caches
            for node in each.nodes
        )
        for each in result.stretches
    ]


def test_what_attention_gathers_is_in_one_stretch():
    """One kernel computes both, but stretches begin behind the product between them."""
    result = found(paged, tokens(), weights(7), *cached(7))
    assert gathered(result) == [2] * 6


def test_nothing_is_gathered_behind_what_changes_a_tensor():
    graph = rewrite(paged, tokens(), weights(7), *cached(7), passes=PIPELINE).graph
    for each in repeats(graph).stretches:
        keys = each.nodes[0]
        with graph.inserting_after(keys):
            filled = graph.call_function(torch.ops.aten.fill_.Scalar, (keys.args[0], 0.0))
        filled.meta["val"] = keys.args[0].meta["val"]
    assert gathered(repeats(graph)) == [1] * 6


def test_what_is_read_elsewhere_too_is_gathered_outside():
    def keeping(x, *given):
        kept = []
        return paged(x, *given, used=kept.append), kept

    assert gathered(found(keeping, tokens(), weights(7), *cached(7))) == [1] * 6


def test_what_is_gathered_elsewhere_is_no_sibling():
    def twice(x, layers, caches, write, read):
        return paged(x, layers, caches, write, read, keys_at=read + 1)

    assert gathered(found(twice, tokens(), weights(7), *cached(7))) == [1] * 6
