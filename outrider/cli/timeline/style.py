"""Looks of the timeline picture: the style sheet of the SVG and the page around it."""

STYLE = """
svg.timeline {
  --ink:#1c2330; --soft:#68707f; --line:#e3e6ec; --paper:#ffffff; --inside:#ffffff;
  --draft:#17907f; --wire:#c58a1c; --verify:#4a5fd0; --accepted:#2c9c4b; --bonus:#d9603b;
  background:var(--paper);
  font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
}
@media (prefers-color-scheme: dark) {
  svg.timeline {
    --ink:#e8ebf2; --soft:#98a1b3; --line:#2b3242; --paper:#141923; --inside:#10141d;
    --draft:#35b7a3; --wire:#dfa83d; --verify:#8093ff; --accepted:#4fc971; --bonus:#ff8a63;
  }
}
.timeline text { fill:var(--ink); }
.timeline text.soft { fill:var(--soft); }
.timeline text.lane { font-weight:600; font-size:12px; }
.timeline text.label { fill:var(--inside); font-size:10px; pointer-events:none; }
.timeline .grid { stroke:var(--line); }
.timeline .stripe { fill:var(--line); opacity:.35; }
.timeline rect.draft { fill:var(--draft); }
.timeline rect.wire { fill:var(--wire); }
.timeline rect.verify { fill:var(--verify); }
.timeline .bar:hover { opacity:.75; }
.timeline .accepted { fill:var(--accepted); }
.timeline .bonus { fill:none; stroke:var(--bonus); stroke-width:1.6; }
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Outrider timeline</title>
<style>
:root { color-scheme: light dark; }
body { margin:0; padding:24px; background:#f5f6f9; color:#1c2330;
  font:14px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif; }
h1 { font-size:18px; margin:0 0 4px; }
p { margin:0 0 16px; color:#68707f; }
dl { display:flex; flex-wrap:wrap; gap:12px; margin:0 0 16px; }
dl div { background:#fff; border:1px solid #e3e6ec; border-radius:8px; padding:8px 14px; }
dt { color:#68707f; font-size:12px; }
dd { margin:2px 0 0; font-size:17px; font-variant-numeric:tabular-nums; }
figure { display:flex; margin:0; overflow-x:auto;
  background:#fff; border:1px solid #e3e6ec; border-radius:8px; }
figure svg { display:block; flex:none; }
.names { position:sticky; left:0; z-index:1; margin-right:-86px; flex:none; }
@media (prefers-color-scheme: dark) {
  body { background:#0e121a; color:#e8ebf2; }
  p, dt { color:#98a1b3; }
  dl div, figure { background:#141923; border-color:#2b3242; }
}
</style>
</head>
<body>
<h1>Outrider timeline</h1>
<p>One request: when the draft, the wire and the target did what. Hover over a bar for its figures.</p>
<dl>@FACTS@</dl>
<figure><div class="names">@NAMES@</div>@SVG@</figure>
</body>
</html>
"""
