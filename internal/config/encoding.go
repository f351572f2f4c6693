// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"fmt"
	"unicode/utf8"

	"github.com/segue-lb/segue/internal/fieldpath"
)

// checkEncoding returns an error unless a file is text in UTF-8, which may begin with a byte order mark.
// YAML's reader tells neither the line nor the encoding.
func checkEncoding(data []byte) *fieldpath.Error {
	at := func(i int, format string, args ...any) *fieldpath.Error {
		return &fieldpath.Error{Line: 1 + bytes.Count(data[:i], []byte("\n")), Problem: fmt.Sprintf(format, args...)}
	}
	if name := otherEncoding(data); name != "" {
		return at(0, "the file is %s; it must be UTF-8", name)
	}
	if i := bytes.IndexByte(data, 0); i >= 0 {
		return at(i, "the file is binary: it has a zero byte here; it must be text")
	}
	for i := 0; i < len(data); {
		r, size := utf8.DecodeRune(data[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			return at(i, "the file is not UTF-8: it has the byte %#02x here", data[i])
		case r < ' ' && r != '\t' && r != '\n' && r != '\r':
			return at(i, "the file has the control character %U here; it must be text", r)
		}
		i += size
	}
	return nil
}

// otherEncoding returns the name of another encoding of Unicode. Without a byte order mark, every second
// byte of an ASCII character is zero. An empty name: there is no sign of another one.
func otherEncoding(data []byte) string {
	is := func(prefix string) bool { return bytes.HasPrefix(data, []byte(prefix)) }
	switch {
	case is("\xff\xfe\x00\x00"), is("\x00\x00\xfe\xff"):
		return "UTF-32"
	case is("\xff\xfe"), is("\xfe\xff"):
		return "UTF-16"
	case len(data) >= 4 && (data[0] == 0) != (data[1] == 0) && (data[0] == 0) == (data[2] == 0) &&
		(data[1] == 0) == (data[3] == 0):
		return "UTF-16"
	}
	return ""
}

// secondDocument returns the line at which the second document of a text begins.
func secondDocument(data []byte) int {
	began, ended := false, false
	number := 0
	for line := range bytes.Lines(data) {
		number++
		content := bytes.TrimSpace(line)
		switch {
		case isMark(line, "---"):
			if began {
				return number
			}
			began = true
		case isMark(line, "..."):
			ended = began
		case len(content) == 0 || content[0] == '#' || content[0] == '%' && (!began || ended):
		case ended:
			return number
		default:
			began = true
		}
	}
	return number
}

// isMark tells whether a line is a mark that begins or ends a document.
func isMark(line []byte, mark string) bool {
	rest, ok := bytes.CutPrefix(line, []byte(mark))
	return ok && (len(rest) == 0 || isSpace(rest[0]))
}
