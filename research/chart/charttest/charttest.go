// SPDX-License-Identifier: Apache-2.0

// Package charttest has checks of charts for tests.
package charttest

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

// letter is the mean width of a letter of a sans-serif font of 12 units.
const letter = 6.2

var rotation = regexp.MustCompile(`^rotate\(-([0-9.]+) `)

// TextInside checks that all texts of an SVG document are inside the chart. It estimates their
// width from the number of their letters.
func TextInside(t *testing.T, svg []byte) {
	t.Helper()
	d := xml.NewDecoder(bytes.NewReader(svg))
	var wide, high float64
	var text map[string]string // the attributes of the text that is being read
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, svg)
		}
		switch token := token.(type) {
		case xml.StartElement:
			attributes := map[string]string{}
			for _, a := range token.Attr {
				attributes[a.Name.Local] = a.Value
			}
			if token.Name.Local == "svg" && wide == 0 {
				if _, err := fmt.Sscanf(attributes["viewBox"], "0 0 %g %g", &wide, &high); err != nil {
					t.Fatalf("view box %q: %v", attributes["viewBox"], err)
				}
			}
			text = nil
			if token.Name.Local == "text" {
				text = attributes
			}
		case xml.CharData:
			content := strings.TrimSpace(string(token))
			if text == nil || content == "" {
				continue
			}
			left, top, right, bottom := box(t, text, content)
			if left < 0 || top < 0 || right > wide || bottom > high {
				t.Errorf("%q is at x %.0f to %.0f and y %.0f to %.0f, outside a chart of %.0f × %.0f",
					content, left, right, top, bottom, wide, high)
			}
		}
	}
}

// box returns the bounds of a text.
func box(t *testing.T, attributes map[string]string, content string) (left, top, right, bottom float64) {
	t.Helper()
	var x, y, degrees float64
	for value, text := range map[*float64]string{&x: attributes["x"], &y: attributes["y"]} {
		if _, err := fmt.Sscan(text, value); err != nil {
			t.Fatalf("text %q: %q: %v", content, text, err)
		}
	}
	size := letter * float64(utf8.RuneCountInString(content))
	before := map[string]float64{"": 0, "middle": 0.5, "end": 1}[attributes["text-anchor"]] * size
	behind := size - before
	if found := rotation.FindStringSubmatch(attributes["transform"]); found != nil {
		if _, err := fmt.Sscan(found[1], &degrees); err != nil {
			t.Fatalf("text %q: %v", content, err)
		}
	}
	along, down := math.Cos(degrees*math.Pi/180), math.Sin(degrees*math.Pi/180)
	return x - before*along, y - 8 - behind*down, x + behind*along, y + before*down
}
