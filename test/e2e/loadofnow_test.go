// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

// needModules builds the modules for Apache and nginx, and puts them where labs find them.
func needModules(t *testing.T) {
	t.Helper()
	testhost.NeedCommand(t, "apxs", "apache2-dev")
	testhost.NeedCommand(t, "dh_nginx", "nginx-dev")
	build := exec.Command("modules/build.sh")
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the modules: %v\n%s", err, out)
	}
	built, err := filepath.Abs("../../bin/modules")
	must(t, err)
	must(t, os.Symlink(built, filepath.Join(filepath.Dir(laboratory), "modules")))
}

// TestLoadOfNow lets servers decide by the load of the moment of their real applications: the
// emulated server, Apache and nginx. No agent runs, so nothing but the applications writes loads.
func TestLoadOfNow(t *testing.T) {
	t.Parallel()
	needModules(t)
	const threshold = 2
	s := huntingServices(2)[0]
	s.Accept = desired.Accept{Policy: desired.AcceptStatic, Threshold: new(uint32(threshold))}
	s.Load.Kind = desired.LoadSharedMap
	topology := hunting(s)
	topology.Balancers, topology.Servers = 1, 3
	topology.Applications = []lab.Application{lab.Emulated, lab.Apache, lab.Nginx}
	l := up(t, topology)
	rows := openRows(t, l)
	for _, server := range nodes(l, lab.RoleServer) {
		eventually(t, func() error {
			states, err := l.Node(server).AcceptStates()
			if err == nil && states[s.Name].Stale {
				err = fmt.Errorf("%s: the load is unknown", server)
			}
			return err
		})
		must(t, l.Process(server, "agent").Stop())
	}
	// Requests that occupy a worker, or are in progress, until the client closes the connection.
	for server, request := range map[string]string{
		"s1": "GET / HTTP/1.1\r\n",
		"s2": "GET / HTTP/1.1\r\n",
		"s3": "PUT /upload/file HTTP/1.1\r\nHost: test\r\nContent-Length: 10\r\n\r\n",
	} {
		var busy []net.Conn
		for i := range threshold {
			requireServer(t, s, rows.dialFirst(t, l, s, server), server)
			awaitLoad(t, l, server, s.Name, i)
			conn := rows.dialFirst(t, l, s, server)
			_, err := io.WriteString(conn, request)
			must(t, err)
			busy = append(busy, conn)
			awaitShown(t, l, server, s.Name, i+1)
		}
		before := offers(t, l, server, s.Name)
		must(t, rows.dialFirst(t, l, s, server).Close())
		after := offers(t, l, server, s.Name)
		if after.refused != before.refused+1 || after.accepted != before.accepted {
			t.Errorf("%s is busy, and has not refused: %+v, then %+v", server, before, after)
		}
		for i, conn := range busy {
			must(t, conn.Close())
			awaitLoad(t, l, server, s.Name, threshold-1-i)
			requireServer(t, s, rows.dialFirst(t, l, s, server), server)
			awaitLoad(t, l, server, s.Name, threshold-1-i)
		}
	}
}
