// The contrast of texts with what is behind them, after WCAG 2.2.
function contrast(first, second) {
  const [light, dark] = [blend(first, second), second].map(luminance).sort((a, b) => b - a)
  return (light + 0.05) / (dark + 0.05)
}

function luminance(colour) {
  const [r, g, b] = numbersOf(colour).map(part => {
    const share = part / 255
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4
  })
  return 0.2126 * r + 0.7152 * g + 0.0722 * b
}

function numbersOf(colour) {
  return colour.match(/[\d.]+/g).map(Number)
}

// The colour that is seen where the first one, which may be transparent, is above the second.
function blend(first, second) {
  const [above, below] = [first, second].map(numbersOf)
  const alpha = above[3] ?? 1
  return `rgb(${[0, 1, 2].map(index => alpha * above[index] + (1 - alpha) * below[index]).join(", ")})`
}

function backgroundOf(element, known = new Map()) {
  if (!element) return "rgb(255, 255, 255)"
  if (!known.has(element)) {
    const colour = getComputedStyle(element).backgroundColor
    known.set(element, blend(colour, backgroundOf(element.parentElement, known)))
  }
  return known.get(element)
}
