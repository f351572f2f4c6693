// SPDX-License-Identifier: Apache-2.0

package wiki

import (
	"bufio"
	"encoding/xml"
	"fmt"
	"io"
)

// Dump writes all pages in MediaWiki's export format, which its importDump.php reads
// (https://www.mediawiki.org/xml/export-0.11.xsd).
func (w *Wiki) Dump(out io.Writer) error {
	b := bufio.NewWriter(out)
	fmt.Fprintln(b, `<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" `+
		`xml:lang="en">`)
	for _, t := range templates {
		writePage(b, t.title, templateSpace, t.text)
	}
	for i, title := range w.titles {
		writePage(b, title, 0, w.text(i))
	}
	fmt.Fprintln(b, "</mediawiki>")
	return b.Flush()
}

// templateSpace is the number of MediaWiki's namespace for templates.
const templateSpace = 10

// writePage writes a page with one revision. The caller finds errors in the writer's Flush.
func writePage(b *bufio.Writer, title string, namespace int, text string) {
	fmt.Fprintf(b, "<page><title>%s</title><ns>%d</ns><revision>"+
		"<timestamp>2026-01-01T00:00:00Z</timestamp><contributor><ip>192.0.2.1</ip></contributor>"+
		"<model>wikitext</model><format>text/x-wiki</format><text xml:space=\"preserve\">",
		title, namespace)
	xml.EscapeText(b, []byte(text))
	fmt.Fprint(b, "</text></revision></page>\n")
}
