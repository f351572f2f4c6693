// SPDX-License-Identifier: Apache-2.0

package store

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/internal/testhost"
)

// authority signs certificates.
type authority struct {
	t           *testing.T
	dir         string
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir()}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, NotAfter: time.Now().Add(time.Hour),
	}
	var der []byte
	a.key, der = a.sign(template, template, nil)
	var err error
	if a.certificate, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.write("ca.pem", "CERTIFICATE", der)
	return a
}

// sign returns a new key, and a certificate for it that is signed by another key. If that is nil,
// the new key itself signs.
func (a *authority) sign(
	template, by *x509.Certificate, key *ecdsa.PrivateKey,
) (*ecdsa.PrivateKey, []byte) {
	a.t.Helper()
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	testhost.Must(a.t, err)
	if key == nil {
		key = own
	}
	der, err := x509.CreateCertificate(rand.Reader, template, by, own.Public(), key)
	testhost.Must(a.t, err)
	return own, der
}

// issue writes a certificate and its key.
func (a *authority) issue(name string) (certFile, keyFile string) {
	a.t.Helper()
	key, der := a.sign(&x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name},
		NotAfter:    time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, a.certificate, a.key)
	text, err := x509.MarshalECPrivateKey(key)
	testhost.Must(a.t, err)
	return a.write(name+".pem", "CERTIFICATE", der), a.write(name+".key", "EC PRIVATE KEY", text)
}

func (a *authority) write(name, kind string, der []byte) string {
	a.t.Helper()
	path := filepath.Join(a.dir, name)
	testhost.Must(a.t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
	return path
}

// reads returns an error if a process with this configuration cannot read the store.
func reads(t *testing.T, cfg *desired.Etcd) error {
	t.Helper()
	s, err := Open(cfg, "test")
	if err != nil {
		return err
	}
	defer s.Close()
	_, err = s.Read(t.Context())
	return err
}

// Both sides of a connection prove who they are by certificates.
func TestTLS(t *testing.T) {
	t.Parallel()
	ours, others := newAuthority(t), newAuthority(t)
	ca := filepath.Join(ours.dir, "ca.pem")
	cert, key := ours.issue("etcd")
	listen := etcdtest.FreePort(t)
	etcdtest.StartAt(t, listen, "https", "--cert-file="+cert, "--key-file="+key, "--client-cert-auth",
		"--trusted-ca-file="+ca)
	cfg := desired.Etcd{Endpoints: []string{"https://" + listen}, Prefix: prefix, CAFile: ca}
	cfg.CertFile, cfg.KeyFile = ours.issue("lb1")
	requireFleet(t, &cfg)
	cfg.CertFile, cfg.KeyFile = others.issue("lb1")
	if reads(t, &cfg) == nil {
		t.Error("a certificate of another authority is accepted")
	}
	cfg.CertFile, cfg.KeyFile = ours.issue("lb1")
	cfg.CAFile = filepath.Join(others.dir, "ca.pem")
	if err := reads(t, &cfg); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("a store of another authority: %v", err)
	}
	cfg.CAFile = filepath.Join(ours.dir, "missing.pem")
	if err := reads(t, &cfg); err == nil {
		t.Error("a missing file is no error")
	}
}

// withPasswords makes a server refuse requests without a password. The user segue, whose password is
// balance, may use the keys of the fleet.
func withPasswords(t *testing.T, server *etcdtest.Server) {
	t.Helper()
	c, ctx := server.Client(), t.Context()
	for _, step := range []func() error{
		func() error { _, err := c.UserAdd(ctx, "root", "secret"); return err },
		func() error { _, err := c.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := c.UserAdd(ctx, "segue", "balance"); return err },
		func() error { _, err := c.RoleAdd(ctx, "segue"); return err },
		func() error {
			_, err := c.RoleGrantPermission(ctx, "segue", prefix+"/", clientv3.GetPrefixRangeEnd(prefix+"/"),
				clientv3.PermissionType(clientv3.PermReadWrite))
			return err
		},
		func() error { _, err := c.UserGrantRole(ctx, "segue", "segue"); return err },
		func() error { _, err := c.AuthEnable(ctx); return err },
	} {
		testhost.Must(t, step())
	}
}

// A user with a password may use the keys of the fleet.
func TestPassword(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	withPasswords(t, server)
	file := filepath.Join(t.TempDir(), "password")
	cfg := desired.Etcd{
		Endpoints: []string{server.Endpoint()}, Prefix: prefix, Username: "segue", PasswordFile: file,
	}
	for password, works := range map[string]bool{"balance\n": true, "wrong\n": false} {
		testhost.Must(t, os.WriteFile(file, []byte(password), 0o600))
		err := reads(t, &cfg)
		if (err == nil) != works || err != nil && !strings.Contains(err.Error(), "authentication failed") {
			t.Errorf("password %q: %v", password, err)
		}
	}
	testhost.Must(t, os.Chmod(file, 0o644))
	if err := reads(t, &cfg); err == nil || !strings.Contains(err.Error(), "mode 0644") {
		t.Errorf("a password that everybody can read: %v", err)
	}
	testhost.Must(t, os.Chmod(file, 0o600))
	// A fleet needs access to the keys below the prefix only.
	testhost.Must(t, os.WriteFile(file, []byte("balance\n"), 0o600))
	requireFleet(t, &cfg)
}

// A balancer with a password restarts while the store is away. It goes on with its last state, and
// then follows the store. A balancer that still has its token follows the store, too.
func TestPasswordWithoutStore(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t)
	withPasswords(t, server)
	file := filepath.Join(t.TempDir(), "password")
	testhost.Must(t, os.WriteFile(file, []byte("balance\n"), 0o600))
	cfg := desired.Etcd{
		Endpoints: []string{server.Endpoint()}, Prefix: prefix, Username: "segue", PasswordFile: file,
	}
	operator, err := Open(&cfg, "operator")
	testhost.Must(t, err)
	defer operator.Close()
	f := fleetOf(t, operator)
	b := f.addWith(cfg)
	f.addWith(cfg)
	f.await(f.fill(service("web", 10)), time.Now())
	before := b.State()
	server.Kill()
	b.stop()
	b.start()
	b.await(func(s Status) bool { return s.FromCache && s.Follows == before.Version }, "start")
	server.Run()
	f.follow(addServer(1))
}

// requireFleet requires that a fleet with this configuration can work.
func requireFleet(t *testing.T, cfg *desired.Etcd) {
	t.Helper()
	s, err := Open(cfg, "operator")
	testhost.Must(t, err)
	defer s.Close()
	f := fleetOf(t, s)
	b := f.addWith(*cfg)
	f.await(f.fill(service("web", 200)), time.Now(), b)
	f.follow(addServer(1), b)
}
