"""How the page of a report looks: light or dark as the reader's system is, at most 1400 px wide."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --card: #f7f8fa; --line: #d7dce2; --ink: #1b2430; --soft: #5c6875;
  --good: #1a7f4b; --good-bg: #e6f5ec; --warn: #9a6200; --warn-bg: #fdf2dc; --bad: #b3261e; --bad-bg: #fdeceb;
  --none-bg: #eef0f3; --edge: #6d7a88;
  --routing: #e3ecfb; --routing-line: #5b86c9; --move: #ece6f8; --move-line: #8a6bc4;
  --product: #fde9d6; --product-line: #cf8136; --pointwise: #fbf5d4; --pointwise-line: #b59f2c;
  --fused: #d9f2e3; --fused-line: #2f9a63; --outside: #f1f3f5; --outside-line: #b4bcc5 }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --card: #1c2229; --line: #343d47; --ink: #e6eaef;
  --soft: #9aa6b2; --good: #5fd095; --good-bg: #17301f; --warn: #eab75a; --warn-bg: #33280f; --bad: #ff8a80;
  --bad-bg: #3a1b1a; --none-bg: #262d35; --edge: #8895a3;
  --routing: #1d2f4c; --move: #2e2547; --product: #45301a; --pointwise: #3a3515; --fused: #173a28; --outside: #232a32;
  --outside-line: #4b5661 } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1400px;
  margin: 0 auto; padding: 24px 24px 64px }
code, pre, svg text { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace }
code, pre { font-size: 13px } code { overflow-wrap: anywhere }
h1 { font-size: 15px; font-weight: 600; color: var(--soft); margin: 0 0 12px }
h2 { font-size: 19px; margin: 36px 0 12px } h3 { font-size: 16px; margin: 0; overflow-wrap: anywhere }
a { color: inherit; text-decoration: none }
.verdict { border-radius: 10px; padding: 18px 22px; border-left: 8px solid; font-size: 15px }
.verdict strong { display: block; font-size: 26px; line-height: 1.25 }
.good { background: var(--good-bg); border-color: var(--good) } .good strong { color: var(--good) }
.warn { background: var(--warn-bg); border-color: var(--warn) } .warn strong { color: var(--warn) }
.bad { background: var(--bad-bg); border-color: var(--bad) } .bad strong { color: var(--bad) }
.none { background: var(--none-bg); border-color: var(--soft) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 14px 0 }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px }
.tile b { display: block; font-size: 22px; line-height: 1.3; white-space: nowrap }
.tile small { font-size: 14px; font-weight: 600; color: var(--good) } .tile span { color: var(--soft); font-size: 13px }
.tile.alert b { color: var(--bad) }
.remarks { margin: 0; padding-left: 20px } .remarks li { margin: 4px 0 }
.strip { display: flex; flex-wrap: wrap; gap: 4px; margin: 8px 0 }
.strip a { width: 30px; height: 30px; border-radius: 5px; border: 1px solid; text-align: center; font-size: 12px;
  line-height: 28px }
.fused-cell { background: var(--good-bg); border-color: var(--good); color: var(--good) }
.part-cell { background: var(--warn-bg); border-color: var(--warn); color: var(--warn) }
.none-cell { background: var(--bad-bg); border-color: var(--bad); color: var(--bad) }
.stock-cell { background: var(--none-bg); border-color: var(--soft); color: var(--soft) }
.legend { display: flex; flex-wrap: wrap; gap: 6px 18px; font-size: 13px; color: var(--soft); margin: 10px 0 }
.legend i { display: inline-block; width: 16px; height: 12px; border: 1px solid; border-radius: 3px; margin-right: 6px }
.layer { border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; margin: 0 0 20px }
.layer header { display: flex; flex-wrap: wrap; gap: 6px 12px; align-items: baseline; margin-bottom: 4px }
.badge { border: 1px solid; border-radius: 999px; padding: 0 10px; font-size: 13px; white-space: nowrap }
.facts { color: var(--soft); font-size: 13.5px; margin: 0 0 10px }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 16px }
figure { margin: 0; min-width: 0 } figcaption { font-weight: 600; font-size: 14px; margin-bottom: 6px }
figure svg { max-width: 100%; height: auto; display: block }
.events { list-style: none; margin: 12px 0 0; padding: 10px 14px; background: var(--card); border-radius: 8px;
  font-size: 13.5px } .events li { padding: 2px 0; overflow-wrap: anywhere }
.events .no { color: var(--bad) } .events .kept { color: var(--warn) }
.list { margin: 0; padding: 0; list-style: none }
.list li, .remarks li, .facts { overflow-wrap: anywhere }
.list li { border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 14px; margin-bottom: 10px } .list pre { background: var(--card); border-radius: 6px; padding: 8px 12px;
  margin: 8px 0 0; white-space: pre-wrap; overflow-wrap: anywhere } .list .where { color: var(--soft); font-size: 13px }
details { margin-top: 10px } summary { cursor: pointer; color: var(--soft); font-size: 13.5px }
details > pre { background: var(--card); padding: 14px; border-radius: 8px; white-space: pre-wrap;
  overflow-wrap: anywhere }
svg text { fill: var(--ink); font-size: 12px } svg .label { font-weight: 600 }
svg .detail, svg .chip { fill: var(--soft); font-size: 11px } svg .no { fill: var(--bad); font-size: 11.5px }
svg .kept { fill: var(--warn); font-size: 11.5px }
svg rect { stroke-width: 1.2 } svg path { fill: none; stroke: var(--edge); stroke-width: 1.3 }
svg .head { fill: var(--edge); stroke: none }
.routing { fill: var(--routing); stroke: var(--routing-line); background: var(--routing); color: var(--routing-line) }
.move { fill: var(--move); stroke: var(--move-line); background: var(--move); color: var(--move-line) }
.product { fill: var(--product); stroke: var(--product-line); background: var(--product); color: var(--product-line) }
.pointwise { fill: var(--pointwise); stroke: var(--pointwise-line); background: var(--pointwise);
  color: var(--pointwise-line) }
.fused { fill: var(--fused); stroke: var(--fused-line); background: var(--fused); color: var(--fused-line) }
.outside { fill: var(--outside); stroke: var(--outside-line); stroke-dasharray: 4 3; background: var(--outside);
  color: var(--outside-line) } i.outside { border-style: dashed }
rect.is-refused, i.is-refused { stroke: var(--bad); stroke-width: 2.4; color: var(--bad) }
@media print { body { max-width: none } .layer { break-inside: avoid } }
@media (max-width: 900px) { .pair { grid-template-columns: 1fr } }
"""
