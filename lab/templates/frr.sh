{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
# Start bgpd only when zebra listens. Otherwise bgpd tries again only after ten seconds. The socket of
# a zebra that has ended would look like one that listens.
rm -f {{.Dir}}/zserv.api
{{.FRR}}/zebra -f {{.Dir}}/../conf/edge-zebra.conf -i {{.Dir}}/zebra.pid -z {{.Dir}}/zserv.api \
    --vty_socket {{.Dir}} -P 0 --log stdout &
until [ -S {{.Dir}}/zserv.api ]; do
    kill -0 $! || exit 1
    sleep 0.05
done
{{- if .BFD}}
# FRR 10 has no --bfdctl. Earlier versions need it to make this socket in the lab's directory.
bfdctl=
if {{.FRR}}/bfdd --help | grep -q -e --bfdctl; then bfdctl="--bfdctl {{.Dir}}/bfdd.sock"; fi
{{.FRR}}/bfdd -f {{.Dir}}/../conf/edge-bfdd.conf -i {{.Dir}}/bfdd.pid -z {{.Dir}}/zserv.api \
    --vty_socket {{.Dir}} $bfdctl -P 0 --log stdout &
{{- end}}
exec {{.FRR}}/bgpd -f {{.Dir}}/../conf/edge-bgpd.conf -i {{.Dir}}/bgpd.pid -z {{.Dir}}/zserv.api \
    --vty_socket {{.Dir}} -P 0 --log stdout
