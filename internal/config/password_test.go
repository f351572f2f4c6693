// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

func TestReadPasswords(t *testing.T) {
	t.Parallel()
	peer := netip.MustParseAddr("192.0.2.1")
	for _, test := range []struct {
		name, content string
		mode          os.FileMode
		want, problem string
	}{
		{"line", "secret\n", 0o600, "secret", ""},
		{"no line break", "secret", 0o400, "secret", ""},
		{"carriage return", "secret\r\n", 0o600, "secret", ""},
		{"spaces", " a secret \n", 0o600, " a secret ", ""},
		{"longest", strings.Repeat("x", 80) + "\r\n", 0o600, strings.Repeat("x", 80), ""},
		{"too long", strings.Repeat("x", 81) + "\n", 0o600, "", "1 to 80 bytes, has more"},
		{"much too long", strings.Repeat("x", 200), 0o600, "", "1 to 80 bytes, has more"},
		{"empty", "\n", 0o600, "", "1 to 80 bytes"},
		{"two lines", "secret\nother\n", 0o600, "", "one line"},
		{"for all", "secret\n", 0o644, "", "mode 0644"},
		{"missing", "", 0, "", "no such file"},
	} {
		t.Run(test.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "password")
			if test.mode != 0 {
				testhost.Must(t, os.WriteFile(file, []byte(test.content), test.mode))
			}
			b := &desired.BGP{Peers: []desired.BGPPeer{{}, {Address: peer, PasswordFile: file}}}
			passwords, err := ReadPasswords(b)
			if test.problem == "" {
				if err != nil || len(passwords) != 1 || passwords[peer.String()] != test.want {
					t.Errorf("%v, error %v; want %q", passwords, err, test.want)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), "bgp.peers[1].password-file "+`"`+file+`"`) ||
				!strings.Contains(err.Error(), test.problem) {
				t.Errorf("error %v, want %s", err, test.problem)
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("the error quotes the password: %v", err)
			}
		})
	}
}
