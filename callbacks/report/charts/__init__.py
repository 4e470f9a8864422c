"""Draw curves as inline SVG, as a PNG and as JSON for the page's script."""
