// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"
)

// responses has a response in each form, and one with each mistake.
var responses = []string{
	"HTTP/1.1 200 OK\r\nX-Segue-Server: s1\r\nContent-Length: 5\r\n\r\nhello",
	"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
	"HTTP/1.1 204 No Content\r\n\r\n",
	"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nEnd: 1\r\n\r\n",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello",
	"HTTP/1.0 200 OK\r\n\r\nhello",
	"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
	"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-2\r\n",
	"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
	"SSH-2.0-OpenSSH\r\n\r\n",
}

// feedAll feeds a response in pieces that end at the given places.
func feedAll(text string, ends ...int) (r response, rest []byte, err error) {
	heads := newHeadReader("X-Segue-Server", true)
	from := 0
	for _, end := range append(ends, len(text)) {
		if rest, err = r.feed([]byte(text[from:end]), heads); err != nil {
			return r, rest, err
		}
		from = end
	}
	return r, rest, nil
}

// expected reads a response by net/http.
func expected(text string) (status int, body []byte, err error) {
	reader := bufio.NewReader(strings.NewReader(text))
	for {
		parsed, err := http.ReadResponse(reader, nil)
		if err != nil {
			return 0, nil, err
		}
		if parsed.StatusCode >= 200 {
			body, err = io.ReadAll(parsed.Body)
			return parsed.StatusCode, body, err
		}
	}
}

// checkResponse compares a response, fed in pieces, with what net/http reads.
func checkResponse(t *testing.T, text string, ends ...int) {
	t.Helper()
	status, body, want := expected(text)
	got, _, err := feedAll(text, ends...)
	if whole := err == nil && got.end(); whole != (want == nil) {
		t.Fatalf("%q in pieces %v: complete %v, error %v; net/http says %v", text, ends, whole, err, want)
	}
	kept := body[:min(len(body), mostBody)]
	if want == nil && (got.status != status || !bytes.Equal(got.body, kept)) {
		t.Fatalf("%q in pieces %v: %d %q, want %d %q", text, ends, got.status, got.body, status, body)
	}
}

// TestResponses cuts each response at each place, and compares with net/http.
func TestResponses(t *testing.T) {
	for _, text := range responses {
		for first := range len(text) {
			for second := first; second < len(text); second++ {
				checkResponse(t, text, first, second)
			}
		}
	}
}

// TestResponseDetails: the server's name, whether the connection can be used again, and what
// follows the response.
func TestResponseDetails(t *testing.T) {
	r, rest, err := feedAll(responses[0] + "more")
	if err != nil || r.server != "s1" || !r.keeps || string(rest) != "more" {
		t.Errorf("%+v, rest %q, error %v", r, rest, err)
	}
	for _, text := range []string{responses[6], responses[7]} {
		if r, _, err := feedAll(text); err != nil || r.keeps {
			t.Errorf("%q: the connection can be used again; error %v", text, err)
		}
	}
	for _, text := range []string{
		"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", mostHead),
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + strings.Repeat("1", mostHead+1),
	} {
		if _, _, err := feedAll(text, len(text)/2); err == nil {
			t.Errorf("a head or a line of %d bytes is no error", len(text))
		}
	}
}

// FuzzResponse: no bytes cause a panic, and where they are cut makes no difference.
func FuzzResponse(f *testing.F) {
	for _, text := range responses {
		f.Add(text, uint(len(text)/2))
	}
	f.Fuzz(func(t *testing.T, text string, cut uint) {
		whole, _, wholeErr := feedAll(text)
		pieces, _, err := feedAll(text, int(cut%uint(len(text)+1)))
		if (wholeErr == nil) != (err == nil) || err == nil && (whole.part != pieces.part ||
			whole.status != pieces.status || !bytes.Equal(whole.body, pieces.body)) {
			t.Errorf("%q: %+v, %v; cut at %d: %+v, %v", text, whole, wholeErr, cut, pieces, err)
		}
	})
}
