"""The style sheet of the report, for light and dark screens and for paper."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #1d2126; --soft: #5c6570; --hair: #e3e6e9; --axis: #9aa3ad; --bad: #b3261e;
  --c0: #2563c9; --c1: #d9730d; --c2: #1b8a5a; --c3: #a23bb0; --c4: #c2314f;
  --c5: #0e8fa8; --c6: #8a6d1a; --c7: #5b5f97; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171a; --card: #1c2024; --ink: #e8eaed; --soft: #a3acb5; --hair: #30363c; --axis: #77818b; --bad: #ff8a80;
  --c0: #6ea8ff; --c1: #ffa657; --c2: #56d39b; --c3: #db8ae6; --c4: #ff8098;
  --c5: #56cfe4; --c6: #d9b95a; --c7: #a9adea; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 2rem 1.25rem 3rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; }
.note { color: var(--soft); margin: 0 0 .35rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin-top: .75rem; background: var(--card);
  border: 1px solid var(--hair); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .875rem; }
th, td { padding: .5rem .7rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--hair); }
thead th { border-top: 0; color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; }
tbody th, thead th:first-child { text-align: left; } .stages thead th:first-child { text-align: right; }
.words { text-align: left; white-space: normal; min-width: 11rem; }
thead th:last-child { text-align: left; }
.overloaded td { color: var(--bad); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .9rem .9rem .5rem;
  background: var(--card); border: 1px solid var(--hair); border-radius: 8px; }
figcaption { font-weight: 600; margin-bottom: .4rem; }
figure svg { display: block; width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: .35rem 1.25rem; list-style: none; margin: 0 0 .9rem; padding: 0; }
.legend li { display: flex; align-items: center; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em;
  background: currentColor; }
.stroke { width: 28px; height: 8px; margin-right: .5em; }
.sample { stroke: var(--soft); stroke-width: 2; }
.grid { stroke: var(--hair); } .axis { stroke: var(--axis); }
.tick { fill: var(--soft); font-size: 12px; } .label { fill: var(--soft); font-size: 12.5px; }
.limit { stroke: var(--bad); stroke-dasharray: 2 4; } .limit-name { fill: var(--bad); font-size: 11.5px; }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.mark { fill: currentColor; } .mark.dashed { fill: var(--card); stroke: currentColor; stroke-width: 1.5; }
.line.dashed, .sample.dashed { stroke-dasharray: 6 4; }
.mark circle, .mark rect { transition: r .1s; } .mark:hover circle { r: 6px; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
@media (max-width: 40rem) { main { padding: 1.25rem .75rem 2rem; } th, td { padding: .4rem .5rem; }
  .tick { font-size: 17px; } .label { font-size: 17px; } .limit-name { font-size: 16px; } }
@media print { figure, .scroll { break-inside: avoid; } }
"""
