"""The style sheets of charts and pages. They hold neither < nor &, so that a page is well-formed XML too."""

from __future__ import annotations

# Okabe and Ito's palette, told apart with every kind of colour vision; the yellow, too pale on paper, is a violet here.
_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5fb0", "#6b7280")
_DARK = ("#4ba6e0", "#ff8a3d", "#2fc79b", "#e59bc4", "#8fd0f7", "#f5bd45", "#ab94e0", "#a3adba")
COLOURS = len(_LIGHT)


def _variables(colours: tuple[str, ...]) -> str:
    return ";".join(f"--s{n}:{colour}" for n, colour in enumerate(colours))


CHART = (
    f"""
.chart{{--ink:#1c2430;--dim:#5b6573;--grid:#e3e7ec;{_variables(_LIGHT)};
display:block;width:100%;height:auto;overflow:visible}}
@media screen and (prefers-color-scheme:dark){{.chart{{--ink:#e8ecf1;--dim:#9aa6b5;--grid:#2c3542;
{_variables(_DARK)}}}}}
"""
    + """
.chart text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--dim);
font-variant-numeric:tabular-nums}
.chart .label{fill:var(--ink)}
.chart .grid{stroke:var(--grid);stroke-width:1}
.chart .marker{stroke:var(--dim);stroke-dasharray:4 3}
.chart .leader{stroke:var(--dim);stroke-width:.6;fill:none;opacity:.6}
.chart .line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.chart .faint{stroke-width:1.2;opacity:.5}
.chart .again{stroke-dasharray:6 3}
.chart .area{stroke:none;opacity:.85}
.chart .hover{fill:transparent;stroke:none}
.chart .hover:hover{fill:var(--ink)}
"""
    + "\n".join(f".chart .s{n}{{stroke:var(--s{n})}}.chart .f{n}{{fill:var(--s{n})}}" for n in range(COLOURS))
)

# Lengths of text in a figure are in the units of its view box: the wider a figure is shown, the smaller they must be to
# stay at the size of the text around it.
PAGE = """
:root{color-scheme:light dark;--paper:#f6f7f9;--card:#fff;--edge:#dfe4ea;--text:#1c2430;
--quiet:#5b6573;--strong:#0b63a5}
@media screen and (prefers-color-scheme:dark){:root{--paper:#12171e;--card:#1a212b;--edge:#2c3542;--text:#e8ecf1;
--quiet:#9aa6b5;--strong:#6cb8f0}}
*{box-sizing:border-box}
:focus-visible{outline:3px solid var(--strong);outline-offset:2px}
body{margin:0;background:var(--paper);color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
main{max-width:1220px;margin:0 auto;padding:32px 24px 48px}
h1{font-size:15px;font-weight:600;color:var(--quiet);margin:0 0 6px;overflow-wrap:anywhere}
h2{font-size:18px;margin:40px 0 12px}
h3{font-size:15px;margin:0 0 10px}
.headline{font-size:clamp(20px,2.4vw,28px);line-height:1.3;font-weight:600;margin:0 0 24px;
max-width:36em;text-wrap:balance}
.headline b{color:var(--strong);white-space:nowrap;font-weight:700}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:20px}
.card{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:18px 20px;margin:0;min-width:0}
figure{container-type:inline-size}
figcaption{color:var(--quiet);font-size:14px;margin-top:8px}
@container (min-width:440px){.chart text{font-size:12.5px}}
@container (min-width:520px){.chart text{font-size:11.5px}}
@container (min-width:620px){.chart text{font-size:10px}}
@container (min-width:760px){.chart text{font-size:8px}}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:7px 12px 7px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--edge)}
tr:last-child th,tr:last-child td{border-bottom:0}
tbody th{font-weight:400;color:var(--quiet)}
td{font-weight:600;overflow-wrap:anywhere}
.settings td,.settings th{font-size:14px;padding-top:4px;padding-bottom:4px}
.many th,.many td{white-space:nowrap;overflow-wrap:normal;padding-right:12px;font-size:14px}
.many .number{text-align:right}
.many thead th{color:var(--quiet);font-size:13px;font-weight:600}
.many tbody th{color:var(--text);font-weight:600}.many td{font-weight:400}
pre span{white-space:pre}
.note{border-left:3px solid var(--strong);padding:2px 0 2px 12px;margin:0 0 12px;overflow-wrap:anywhere}
pre{margin:0;white-space:pre-wrap;overflow-x:auto;
font:14px/1.6 ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace}
footer{color:var(--quiet);font-size:14px;margin-top:40px}
@media (max-width:560px){main{padding:20px 12px 32px}.card{padding:14px 10px}}
@media print{:root{--paper:#fff;--card:#fff}body{font-size:11pt}main{max-width:none;padding:0}
.card{break-inside:avoid;border-color:#ccc}.cards{grid-template-columns:1fr 1fr}h2{break-after:avoid}
.hover{display:none}}
"""
