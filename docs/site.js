// The buttons of the bar that open the menu and the search in a narrow window are reached by Tab, too,
// and the box of the search's results is not: it is empty until something is typed.
for (const [name, label] of [["__drawer", "Menu"], ["__search", "Search"]]) {
  const button = document.querySelector(`label.md-header__button[for=${name}]`)
  button.tabIndex = 0
  button.setAttribute("role", "button")
  button.setAttribute("aria-label", label)
}
document.querySelector(".md-search__scrollwrap").tabIndex = -1
