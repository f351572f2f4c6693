// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// startTLS starts a switch with a certificate of an authority. It serves only controllers with another
// certificate of this authority.
func startTLS(t *testing.T, by *testhost.Authority) (address string) {
	t.Helper()
	cert, err := tls.LoadX509KeyPair(by.Issue("switch"))
	testhost.Must(t, err)
	text, err := os.ReadFile(by.File)
	testhost.Must(t, err)
	clients := x509.NewCertPool()
	clients.AppendCertsFromPEM(text)
	return startFakeAt(t, "127.0.0.1:0", grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{cert}, ClientCAs: clients, ClientAuth: tls.RequireAndVerifyClientCert,
	}))).address
}

// Both ends of the connection prove who they are by certificates, which may be replaced.
func TestTLS(t *testing.T) {
	t.Parallel()
	ours, others := testhost.NewAuthority(t), testhost.NewAuthority(t)
	to := desired.Switch{Address: startTLS(t, ours), ElectionID: 1}
	dial := func(files desired.TLSFiles) error {
		to.TLSFiles = files
		c, err := Dial(t.Context(), &to)
		if err == nil {
			testhost.Must(t, c.Close())
		}
		return err
	}
	files := desired.TLSFiles{CAFile: ours.File}
	files.CertFile, files.KeyFile = ours.Issue("lb")
	testhost.Must(t, dial(files))
	refused := func(what string, files desired.TLSFiles, want string) {
		t.Helper()
		if err := dial(files); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q", what, err, want)
		}
	}
	refused("clear text", desired.TLSFiles{}, "switch "+to.Address)
	refused("no certificate", desired.TLSFiles{CAFile: ours.File}, "switch "+to.Address)
	strange := files
	strange.CAFile = others.File
	refused("a switch of another authority", strange, "unknown authority")
	strange = files
	strange.CertFile, strange.KeyFile = others.Issue("lb")
	refused("a certificate of another authority", strange, "switch "+to.Address)
	strange = files
	strange.CAFile += ".missing"
	refused("a missing file", strange, "node.switch: open "+strange.CAFile)
	testhost.Must(t, os.Chmod(files.KeyFile, 0o644))
	refused("a key for everybody", files, "node.switch.key-file: "+files.KeyFile+" has mode 0644")
}
