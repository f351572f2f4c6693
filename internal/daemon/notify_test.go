// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
)

// A receiver that has gone causes no error. A receiver that listens gets the message.
func TestNotify(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	t.Setenv("NOTIFY_SOCKET", path)
	if err := Notify("READY=1"); err != nil {
		t.Errorf("nobody listens: %v", err)
	}
	listener, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	testhost.Must(t, err)
	defer listener.Close()
	if err := Notify("READY=1"); err != nil {
		t.Error(err)
	}
	_ = listener.SetReadDeadline(time.Now().Add(10 * time.Second))
	message := make([]byte, 64)
	if n, err := listener.Read(message); err != nil || string(message[:n]) != "READY=1" {
		t.Errorf("got %q, %v", message[:n], err)
	}
}
