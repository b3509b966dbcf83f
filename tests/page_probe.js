// Looks at the page that it is in, and writes what is wrong with it into the page's title.
function canScroll(element) {
  for (let e = element; e; e = e.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)) return true
  return false
}

function overlap(a, b) {
  return a.x < b.x + b.width - 1 && b.x < a.x + a.width - 1 && a.y < b.y + b.height - 3 && b.y < a.y + a.height - 3
}

function lookAtFigure(svg, problems) {
  const view = svg.viewBox.baseVal
  const scale = svg.getBoundingClientRect().width / view.width
  const texts = [...svg.querySelectorAll("text")]
  for (const text of texts) {
    const box = text.getBBox()
    const isCut = box.x < -0.5 || box.y < -0.5 || box.x + box.width > view.width + 0.5 || box.y + box.height > view.height + 0.5
    if (isCut) problems.push(`cut in ${svg.getAttribute("aria-label")}: ${text.textContent}`)
    const letters = parseFloat(getComputedStyle(text).fontSize) * scale
    if (letters < 10) problems.push(`letters of ${letters} pixels: ${text.textContent}`)
    const behind = text.classList.contains("on") ? getComputedStyle(text.previousElementSibling).fill : backgroundOf(svg)
    if (contrast(getComputedStyle(text).fill, behind) < 4.5) problems.push(`too little contrast: ${text.textContent}`)
  }
  const shown = texts.filter(text => !text.closest(".note"))
  shown.forEach((first, index) => {
    for (const second of shown.slice(index + 1))
      if (overlap(first.getBBox(), second.getBBox())) problems.push(`overlap: ${first.textContent} and ${second.textContent}`)
  })
  for (const curve of svg.querySelectorAll("polyline, circle")) {
    const style = getComputedStyle(curve)
    const colour = style.stroke === "none" ? style.fill : style.stroke
    if (contrast(colour, backgroundOf(svg)) < 3) problems.push(`too little contrast: a curve of ${svg.getAttribute("aria-label")}`)
  }
  if (!svg.getAttribute("aria-label")) problems.push("a picture without a name")
}

addEventListener("load", () => {
  const problems = []
  if (document.documentElement.scrollWidth > innerWidth) problems.push(`the page is ${document.documentElement.scrollWidth} wide`)
  for (const element of document.querySelectorAll("h1, h2, h3, p, li, td, th, figcaption, code, pre, a, .rows b, .rows > span")) {
    const box = element.getBoundingClientRect()
    if (!canScroll(element) && (box.left < 0 || box.right > innerWidth + 1)) problems.push(`cut: ${element.textContent}`)
    if (element.scrollWidth > element.clientWidth + 1 && element.clientWidth && !canScroll(element) && getComputedStyle(element).display !== "inline") problems.push(`overflows: ${element.textContent}`)
    if (contrast(getComputedStyle(element).color, backgroundOf(element)) < 4.5) problems.push(`too little contrast: ${element.textContent}`)
  }
  for (const svg of document.querySelectorAll("svg:not([aria-hidden])")) lookAtFigure(svg, problems)
  for (const image of document.images) if (!image.alt) problems.push(`a picture without a text: ${image.src}`)
  document.title = JSON.stringify({width: innerWidth, texts: document.body.innerText.length, background: getComputedStyle(document.body).backgroundColor, problems})
})
