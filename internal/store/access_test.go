// SPDX-License-Identifier: Apache-2.0

package store

import (
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
	ours, others := testhost.NewAuthority(t), testhost.NewAuthority(t)
	cert, key := ours.Issue("etcd")
	listen := etcdtest.FreePort(t)
	etcdtest.StartAt(t, listen, "https", "--cert-file="+cert, "--key-file="+key, "--client-cert-auth",
		"--trusted-ca-file="+ours.File)
	cfg := desired.Etcd{Endpoints: []string{"https://" + listen}, Prefix: prefix, TLSFiles: desired.TLSFiles{CAFile: ours.File}}
	cfg.CertFile, cfg.KeyFile = ours.Issue("lb1")
	requireFleet(t, &cfg)
	cfg.CertFile, cfg.KeyFile = others.Issue("lb1")
	if reads(t, &cfg) == nil {
		t.Error("a certificate of another authority is accepted")
	}
	cfg.CertFile, cfg.KeyFile = ours.Issue("lb1")
	cfg.CAFile = others.File
	if err := reads(t, &cfg); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("a store of another authority: %v", err)
	}
	cfg.CAFile = ours.File + ".missing"
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
